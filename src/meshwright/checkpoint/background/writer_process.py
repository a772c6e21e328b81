"""The writer process of one rank: takes saves as lines of JSON on standard input, answers on standard output.

It ends when its input does: with the rank that started it, whose unfinished save is then left for the next to remove.
"""

import time
from pathlib import Path
from typing import Any

from torch.distributed import Store

from meshwright.checkpoint.background.helper_process import answer, requests_of_rank
from meshwright.checkpoint.background.staging import OpenedBuffer
from meshwright.checkpoint.background.store_peers import StorePeers, connect_store
from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.saving import Extent, SaveRequest, write_checkpoint
from meshwright.errors import CheckpointError


def main(options: dict[str, Any]) -> None:
    """Write the saves that arrive on standard input, until it ends."""
    requests = requests_of_rank(options["niceness"])
    store = None
    if options["store"] is not None:
        host, port = options["store"]
        store = connect_store(host, port, options["timeout_s"])
    for request in requests:
        started_s = time.perf_counter()
        error = _write(request, options, store)
        answer({"number": request["number"], "error": error, "duration_s": time.perf_counter() - started_s})


def _write(request: dict[str, Any], options: dict[str, Any], store: Store | None) -> str | None:
    """Write one save; return the error, or None."""
    peers = StorePeers(store, f"save-{request['number']}", options["rank"], options["num_ranks"])
    try:
        with OpenedBuffer(request["buffer"]) as buffer:
            extents = [
                Extent(name, dtype, tuple(shape), Box(tuple(offsets), tuple(sizes)), num_bytes)
                for name, dtype, shape, (offsets, sizes), num_bytes in request["extents"]
            ]
            tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in request["tensors"].items()}
            save = SaveRequest(Path(request["folder"]), request["metadata"], request["sections"], tensors)
            write_checkpoint(save, buffer.extents(extents), peers, _Pace(options["bytes_per_s"]))
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"saving failed on rank {options['rank']}: {type(error).__name__}: {error}"
    return None


class _Pace:
    """Sleeps after each write, so that their mean rate stays below a limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._started_s, self._num_bytes = time.perf_counter(), 0

    def __call__(self, num_bytes: int) -> None:
        if self._bytes_per_s is None:
            return
        self._num_bytes += num_bytes
        early_s = self._num_bytes / self._bytes_per_s - (time.perf_counter() - self._started_s)
        if early_s > 0:
            time.sleep(early_s)
