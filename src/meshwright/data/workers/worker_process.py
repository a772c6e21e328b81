"""A worker process: builds the dataset once, then reads the samples that it is asked for; imports no torch itself."""

import functools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from typing import NamedTuple

from meshwright.data.dataset import Dataset, build_dataset
from meshwright.errors import MeshwrightError
from meshwright.spec.job.sections import DataSection

_section: tuple[DataSection, int] | None = None


class ReadFailure(NamedTuple):
    """Why samples could not be read, in plain text: an error of the user's need not survive pickling."""

    number: int | None
    """The sample; None where building the dataset failed."""
    kind: str | None
    """Name of a MeshwrightError's class; None for an error of the user's code."""
    text: str
    """The message, of the user's code the traceback."""


def begin(section: DataSection, seq_len: int) -> None:
    """Prepare this process to read the samples of a job's [data]."""
    global _section
    _section = section, seq_len
    # A Ctrl-C is for the rank, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Code of the user's may import torch: several workers with several threads each fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threading.Thread(target=_end_with_rank, name="end_with_rank", daemon=True).start()


def _end_with_rank() -> None:
    """End this process with the rank that started it, which may be killed and then ends no one."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(0)


def read_samples(indices: list[int]) -> bytes:
    """Return the pickled samples of `indices`, or a pickled ReadFailure.

    Pickled here, by value: a tensor that is sent by handle needs this process for as long as it is read.
    """
    index: int | None = None
    try:
        dataset, samples = _dataset(), []
        for index in indices:
            samples.append(dataset.read(index))
        return pickle.dumps(samples, pickle.HIGHEST_PROTOCOL)
    except MeshwrightError as error:
        failure = ReadFailure(index, type(error).__name__, str(error))
    except Exception:
        failure = ReadFailure(index, None, traceback.format_exc())
    return pickle.dumps(failure)


@functools.cache
def _dataset() -> Dataset:
    assert _section is not None
    return build_dataset(*_section)
