"""What the package's log says where a disk takes nothing more."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from meshwright.log import logger, warning_if_unwritten
from meshwright.trainer.run.run_recorder import LogFile


def test_a_write_that_fails_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with warning_if_unwritten(Path("manifest.json")):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caplog.messages == ["manifest.json could not be written: No space left on device"]
    with pytest.raises(ValueError, match="another"), warning_if_unwritten(Path("manifest.json")):
        raise ValueError("another")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, which takes no byte, on this system")
def test_a_log_on_a_full_disk_ends_with_one_warning(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log = LogFile("/dev/full")
    logger.addHandler(log)
    try:
        with caplog.at_level(logging.INFO):
            logger.info("step 1")
            logger.info("step 2")
    finally:
        logger.removeHandler(log)
        log.close()
    assert caplog.messages == ["/dev/full ends here: No space left on device", "step 1", "step 2"]
    assert not capsys.readouterr().err
