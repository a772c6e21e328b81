"""A worker process: builds the dataset once, then reads the samples that it is asked for; imports no torch itself."""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from typing import NamedTuple

from meshwright.data.dataset import build_dataset
from meshwright.data.numbered_samples import Dataset
from meshwright.errors import MeshwrightError
from meshwright.spec.job.sections import DataSection, Task


class ReadFailure(NamedTuple):
    """Why samples could not be read, in plain text: an error of the user's need not survive pickling."""

    number: int | None
    """The sample; None where building the dataset failed."""
    kind: str | None
    """Name of a MeshwrightError's class; None for an error of the user's code."""
    text: str
    """The message, of the user's code the traceback."""


def serve_samples(connection: Connection, section: DataSection, seq_len: int, task: Task) -> None:
    """Answer each list of sample numbers with their pickled samples, or a ReadFailure, until the rank closes."""
    # A Ctrl-C is for the rank, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Code of the user's may import torch: several workers with several threads each fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threading.Thread(target=_end_with_rank, name="end_with_rank", daemon=True).start()
    dataset: Dataset | None = None
    while (numbers := _request(connection)) is not None:
        number: int | None = None
        try:
            dataset = dataset or build_dataset(section, seq_len, task)
            samples = []
            for number in numbers:
                samples.append(dataset.read(number))
            # Pickled here, by value: a tensor that is sent by handle needs this process for as long as it is read.
            answer = pickle.dumps(samples, pickle.HIGHEST_PROTOCOL)
        except MeshwrightError as error:
            answer = pickle.dumps(ReadFailure(number, type(error).__name__, str(error)))
        except (Exception, SystemExit):
            answer = pickle.dumps(ReadFailure(number, None, traceback.format_exc()))
        connection.send_bytes(answer)


def _request(connection: Connection) -> list[int] | None:
    try:
        numbers: list[int] = connection.recv()
    except EOFError:
        return None
    return numbers


def _end_with_rank() -> None:
    """End this process with the rank that started it, which may be killed and then ends no one."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(0)
