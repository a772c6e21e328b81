"""The files of docs/how_to/own_cluster.md, as a reader copies them: they load, and plan."""

import re
from pathlib import Path

import pytest

from meshwright.cli.main import run
from repository import ROOT


def test_the_page_works_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "how_to" / "own_cluster.md").read_text(encoding="utf-8")
    files = re.findall(r"^`((?:clusters|devices)/[^`]+)`.*?```toml\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["clusters/my-h100.toml", "devices/my-x1.toml", "clusters/my-x1-node.toml"]
    for name, text in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("MESHWRIGHT_CATALOGUE", str(tmp_path))
    commands = re.findall(r"^meshwright (plan .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert run(command.split()) == 0
        assert "nan" not in capsys.readouterr().out
    # As the page says of a device with a float8 rate.
    assert run([*commands[1].split(), "--precision", "float8-tensorwise"]) == 0
    assert "tokens a step, float8-tensorwise; stack" in " ".join(capsys.readouterr().out.split())
