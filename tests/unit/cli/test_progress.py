"""elapsed(): what a command is doing, on a terminal only."""

from __future__ import annotations

import pytest

from meshwright.app.progress import elapsed


def test_a_terminal_shows_the_text_and_its_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with elapsed("checking") as show:
        show("simulated 1 of 2")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "simulated 1 of 2" in captured.err
    assert "0:00:00" in captured.err


def test_a_pipe_gets_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with elapsed("checking"):
        pass
    assert capsys.readouterr() == ("", "")
