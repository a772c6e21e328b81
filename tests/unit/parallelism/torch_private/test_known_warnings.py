"""silence_known_warnings: what a user cannot act on is hidden, and nothing else of the same logger."""

import logging

import pytest

from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings


def test_only_the_known_lines_are_hidden(caplog: pytest.LogCaptureFixture) -> None:
    silence_known_warnings()
    silence_known_warnings()
    loggers = {name: logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")}
    with caplog.at_level(logging.WARNING):
        loggers["torchao"].warning("Failed to load _C_mxfp8.so: no such symbol")
        loggers["torch.utils._pytree"].warning("%s: Calling register_constant() on Enum subclasses is deprecated", "E")
        assert not caplog.records
        for logger in loggers.values():
            logger.warning("another thing")
    assert [record.getMessage() for record in caplog.records] == ["another thing"] * 2
    assert len(loggers["torchao"].filters) == 1
