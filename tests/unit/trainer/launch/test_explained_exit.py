"""Code of the job that ends its process has not finished the run."""

import sys

import pytest

from meshwright.errors import ExitCode, MeshwrightError
from meshwright.trainer.launch.worker import explained_exit


def test_an_exit_of_the_jobs_code_is_an_error_that_names_the_place() -> None:
    with (
        pytest.raises(MeshwrightError, match=r"SystemExit: 0 \(.*test_explained_exit.py, line") as caught,
        explained_exit(),
    ):
        sys.exit(0)
    assert caught.value.exit_code == ExitCode.DO_NOT_RETRY
