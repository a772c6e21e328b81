"""An error of a disk names the file, or the run folder where we have written, or the line of other code that has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from full_disk import no_file_larger_than
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.explained_error import explained_error
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.run.run_folder import write_atomically


def write_our_file(run: Run) -> None:
    with no_file_larger_than(1000):
        write_atomically(run.metrics, b"0" * 2000)


def write_a_file(run: Run) -> None:
    with no_file_larger_than(1000):
        (run.folder / "theirs").write_bytes(b"0" * 2000)


def raise_with_a_name(run: Run) -> None:
    raise OSError(28, "No space left on device", "/scratch/cache")


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (write_our_file, "{folder}: File too large"),
        (write_a_file, "a file, at {here}:24 in write_a_file: File too large"),
        (raise_with_a_name, "/scratch/cache: No space left on device"),
    ],
)
def test_what_is_named(tmp_path: Path, write: Callable[[Run], None], what: str) -> None:
    run = Run(tmp_path)
    with pytest.raises(OSError) as found:
        write(run)
    explained = explained_error(found.value, Job(), run, Ranks(0, 1, torch.device("cpu")))
    wanted = what.format(folder=tmp_path, here=__file__)
    assert str(explained).startswith(f"rank 0 could not read or write {wanted}: ")
