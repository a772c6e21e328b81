"""The reference of preference optimisation: what the model that a run starts from gives each pair, kept in its folder.

Scored once, before the first step. A resumed run, on whatever ranks, reads the same numbers, to the bit.
"""

import io
import json
import time
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.parameter_hash import parameter_hash
from meshwright.checkpoint.peers import GroupPeers
from meshwright.data.numbered_samples import Dataset
from meshwright.errors import DataError
from meshwright.log import logger
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import write_atomically
from meshwright.trainer.step.score_pairs import score_pairs
from meshwright.trainer.step.training import Training
from meshwright.units import counted, format_duration

_SHOWN_EVERY_S = 10.0


def give_reference(training: Training, run: Run, step: int, mark: Callable[[str], None]) -> None:
    """Give the job's pairs their reference scores, scored at step 0 unless they are there already; a collective.

    `mark` hears of progress. Raises DataError where a run that is resumed after its first step lacks them.
    """
    dataset, peers = training.dataset, GroupPeers()
    if not dataset.num_pairs:
        return
    mark("reference")
    identity: dict[str, Any] = {"data": _identity_of_pairs(dataset.fingerprint)}
    if step == 0:
        identity["weights"] = parameter_hash(canonical_parameters(training.model))
    found = peers.publish(_read(run, identity) if peers.rank == 0 else None)
    if found is None and step > 0:
        raise DataError(
            f"{run.reference} is missing, damaged or of other pairs, and step {step} is no start to score them by: "
            "copy the run folder again with this file, or start it again (--overwrite)"
        )
    if found is None:
        found = score_pairs(training, _Progress(dataset, mark, is_shown=peers.rank == 0))
        if peers.rank == 0:
            content = io.BytesIO()
            np.savez(content, scores=found.numpy(), identity=json.dumps(identity, sort_keys=True))
            write_atomically(run.reference, content.getvalue())
    training.step.reference = found


def _identity_of_pairs(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return what the pairs and their numbers follow from: data may have moved, and a mixture may have new weights."""
    if (tables := fingerprint.get("mixture")) is not None:
        return {"mixture": [_identity_of_pairs(table) for table in tables]}
    return {key: one for key, one in fingerprint.items() if key not in ("source", "name", "weights")}


def _read(run: Run, identity: dict[str, Any]) -> Tensor | None:
    """Return the scores in the run folder; None if there are none, or not of this identity."""
    try:
        with np.load(run.reference) as file:
            held, scores = json.loads(str(file["identity"])), torch.from_numpy(file["scores"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None  # each part of a .npz has a checksum
    expected = json.loads(json.dumps(identity))
    return scores if {key: held.get(key) for key in expected} == expected else None


class _Progress:
    """Callable: says how many rows have been scored, every few seconds and at the end."""

    def __init__(self, dataset: Dataset, mark: Callable[[str], None], *, is_shown: bool) -> None:
        self._dataset, self._mark, self._is_shown = dataset, mark, is_shown
        self._started_s = self._shown_s = time.perf_counter()

    def __call__(self, num_rows: int) -> None:
        """Note that so many rows have been scored."""
        self._mark("reference")
        now_s, total = time.perf_counter(), self._dataset.num_samples
        if not self._is_shown or (num_rows < total and now_s - self._shown_s < _SHOWN_EVERY_S):
            return
        self._shown_s = now_s
        passed_s = now_s - self._started_s
        if num_rows < total:
            left = format_duration(passed_s * (total - num_rows) / num_rows)
            logger.info("the reference has scored %d of %d rows, %s to go", num_rows, total, left)
        else:
            pairs = counted(self._dataset.num_pairs, "pair")
            logger.info("the reference, the model at the start, has scored %s in %s", pairs, format_duration(passed_s))
