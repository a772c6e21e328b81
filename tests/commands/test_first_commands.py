"""The commands of the README and the quickstart run one after the other, on the job that init writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import run
from repository import ROOT, text_of

STARTS_NO_RANK = ("init", "check", "plan", "simulate")


@pytest.mark.long
@pytest.mark.parametrize("document", ["README.md", "docs/quickstart.md"])
def test_the_first_commands_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line.partition("#")[0].split() for line in text_of(ROOT / document).splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["meshwright"]]
    ran = [words for words in commands if words[0] in STARTS_NO_RANK]
    assert {words[0] for words in ran} == set(STARTS_NO_RANK)
    for words in ran:
        try:
            code = run([*words, "--quiet"])
        except SystemExit as ending:
            code = ending.code
        assert code == 0, " ".join(words)
