"""The files of docs/how_to/own_cluster.md, as a reader copies them: they load, and plan."""

import re
from pathlib import Path

import pytest

from meshwright.cli.main import run
from repository import ROOT


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the page's commands, its files being in the catalogue."""
    page = (ROOT / "docs" / "how_to" / "own_cluster.md").read_text(encoding="utf-8")
    files = re.findall(r"^`((?:clusters|devices)/[^`]+)`.*?```toml\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["clusters/my-h100.toml", "devices/my-x1.toml", "clusters/my-x1-node.toml"]
    for name, text in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("MESHWRIGHT_CATALOGUE", str(tmp_path))
    return [command.split() for command in re.findall(r"^meshwright (plan .*)$", page, re.MULTILINE)]


def test_the_page_works_as_it_is(commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert len(commands) == 2
    for command in commands:
        assert run(command) == 0
        assert "nan" not in capsys.readouterr().out


@pytest.mark.long
def test_a_device_with_a_float8_rate_is_planned_in_float8(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*commands[1], "--precision", "float8-tensorwise"]) == 0
    assert "tokens a step, float8-tensorwise; stack" in " ".join(capsys.readouterr().out.split())
