"""Every command's tables and messages on a narrow terminal: no line is wider, and no word is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import VERBS, run
from questions import SMALL_PLAN
from repository import ROOT

TINY = str(ROOT / "examples" / "tiny.toml")
COMMANDS = [
    [*SMALL_PLAN, "--tokens", "1T", "--price-per-gpu-hour", "2"],
    pytest.param([*SMALL_PLAN, "--tokens", "1T", "--frontier", "--price-per-gpu-hour", "2"], marks=pytest.mark.long),
    ["check", TINY],
    ["show", TINY],
    ["init", "llama-1m", "--out", "job.toml"],
    ["list", "models"],
    ["list", "devices"],
    ["list", "clusters"],
    ["doctor"],
    ["train", TINY, "train.steps=0", "layout.tp=3", "nope.key=1"],
    ["plan", "nope.toml", "-q"],
    ["check", TINY, "-v"],
    ["plan", "--model", "llama3.1-405b", "--cluster", "h100:8", "--global-batch-size", "16"],
    ["simulate", TINY, "--ranks", "3", "-q"],
    *([verb, "--help"] for verb in VERBS),
]

_wide: dict[str, str] = {}
"""What each command prints where nothing is broken, which both widths are compared with."""


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, pytest.param(80, marks=pytest.mark.long)])
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(words)[:24])
def test_nothing_is_wider_than_the_terminal_and_no_word_is_broken(
    arguments: list[str],
    width: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def printed(columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        run(arguments)
        (tmp_path / "job.toml").unlink(missing_ok=True)
        captured = capsys.readouterr()
        return captured.out + captured.err

    narrow = printed(width)
    command = " ".join(arguments)
    wide = _wide[command] = _wide.get(command) or printed(400)
    # A path or a layout may be longer than a line: it is broken behind punctuation only.
    longest = max((len(line) for line in narrow.splitlines() if len(line.split()) > 1), default=0)
    assert longest <= width
    whole = {word.rstrip(":,") for word in wide.split()}
    broken = [word for word in narrow.split() if word.rstrip(":,") not in whole]
    assert not [word for word in broken if not set(word) & set("█▏▎▍▌▋▊▉/") and word[-1] not in ",./:=_-"]
