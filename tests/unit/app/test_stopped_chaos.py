"""A chaos run that a signal stops leaves nothing, and says what to do."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

from meshwright.app.chaos import removed_if_stopped
from meshwright.errors import ConfigError, Preempted


@pytest.mark.parametrize("is_launchers", [False, True])
def test_sigterm_removes_the_folder_and_promises_no_resume(tmp_path: Path, is_launchers: bool) -> None:
    folder, before = tmp_path / "runs", signal.getsignal(signal.SIGTERM)
    folder.mkdir()
    with pytest.raises(Preempted) as found, removed_if_stopped(folder):  # noqa: PT012
        (folder / "log").write_text("begun")
        if is_launchers:
            # As the launcher of local ranks raises it.
            raise Preempted("SIGTERM: the ranks were asked to save and stop; continue with --resume")
        os.kill(os.getpid(), signal.SIGTERM)
    assert str(found.value) == "SIGTERM: stopped before its end, and its runs are removed: start the command again"
    assert not folder.exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_removes_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt), removed_if_stopped(folder):
        raise KeyboardInterrupt
    assert not folder.exists()


def test_an_error_keeps_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), removed_if_stopped(tmp_path):
        raise ConfigError("wrong")
    assert tmp_path.exists()
