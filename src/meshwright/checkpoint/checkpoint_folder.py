"""CheckpointFolder: checkpoints of a training loop of your own, on any number of ranks, with any sharding.

folder = CheckpointFolder("runs/mine", keep=3)
state = {"model": model, "optimizer": optimizer, "epoch": 0}
loaded = folder.load(state)
folder.save(state, step)
"""

import json
import os
from collections.abc import MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from meshwright.checkpoint.background.saver import BackgroundSaver, Finished
from meshwright.checkpoint.checkpoint import load, load_newest, save
from meshwright.checkpoint.loop_state import LoopState
from meshwright.checkpoint.peers import GroupPeers, ProcessGroup
from meshwright.checkpoint.prune import prune
from meshwright.errors import CheckpointError, ConfigError, DamagedCheckpoint
from meshwright.log import logger
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run

_VALUES, _OWN = "values", "metadata"
"""Keys of a checkpoint's metadata."""


class LoadedCheckpoint(NamedTuple):
    """What a load found."""

    step: int
    metadata: dict[str, Any]
    """As it was given to `save`."""


class CheckpointFolder:
    """Checkpoints in FOLDER/checkpoints/step-N, in the format that runs have; use it in a `with` for background saves.

    A state is a dict of modules, optimizers, other objects with state_dict and load_state_dict, tensors, DTensors,
    nested dicts of them, and values that JSON holds. Optimizers are saved under the parameter names of a module in the
    same state. Values that are no tensors, and tensors that are no DTensors, are taken to be equal on all ranks.
    """

    def __init__(self, folder: Path | str, *, keep: int | None = None, group: ProcessGroup = None) -> None:
        """`keep` is the number of newest checkpoints that stay, None for all; `group` the ranks, None for all.

        On GPUs the group needs a CPU backend, too: init_process_group("cpu:gloo,cuda:nccl").
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"keep = {keep} must be 1 or more, or None to keep all")
        self._run, self._group = Run(folder), group
        self._rule = None if keep is None else RetentionRule(keep=keep)
        self._saver: BackgroundSaver | None = None
        self._last_error: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After an error a rank may be gone, for whose writer the others would wait.
        if error is None:
            self.finish()
            self.close()

    def steps(self) -> list[int]:
        """Return the steps that have a committed checkpoint, oldest first."""
        return self._run.checkpoint_steps()

    def save(
        self,
        state: MutableMapping[str, Any],
        step: int,
        *,
        metadata: dict[str, Any] | None = None,
        background: bool = False,
    ) -> None:
        """Commit `state` as the checkpoint after `step`, with JSON `metadata`; a collective.

        On return it is on the disk, or nothing is there and CheckpointError was raised on all ranks. In the
        `background` this returns at once: call `wait_until_staged` before the tensors change; failures are logged by
        the next call, and raised by `finish` if the newest save failed.
        """
        if step < 0:
            raise ConfigError(f"step = {step} must be 0 or more")
        opened = LoopState(state)
        described = {
            "step": step,
            _VALUES: _encoded(opened.values, "state"),
            _OWN: _encoded(metadata or {}, "metadata"),
        }
        folder = self._run.checkpoint(step)
        if background:
            self._saver = self._saver or BackgroundSaver(os.environ.get("MASTER_ADDR", "localhost"), group=self._group)
            self._take(self._saver.finished())
            self._saver.save(folder, opened.tensors, described)
        else:
            save(folder, opened.tensors, described, self._group)
            self._committed()

    def load(
        self, state: MutableMapping[str, Any], step: int | Literal["latest"] = "latest"
    ) -> LoadedCheckpoint | None:
        """Fill `state` from the checkpoint after `step`; a collective.

        "latest" takes the newest whose every byte is as it was saved, names what it skips, and returns None where there
        is none. Under each key of `state` exactly the names that were saved must be there; the number of ranks and the
        sharding may differ. Raises CheckpointError on all ranks.
        """
        opened = LoopState(state)
        try:
            found = (
                load_newest(self._run, opened.tensors, self._group)
                if step == "latest"
                else (step, load(self._run.checkpoint(step), opened.tensors, self._group))
            )
        except DamagedCheckpoint:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"the state does not fit: {_without_job_keys(str(error))}") from error
        if found is None:
            return None
        number, metadata = found
        opened.take(json.loads(metadata[_VALUES]))
        return LoadedCheckpoint(number, json.loads(metadata[_OWN]))

    def wait_until_staged(self) -> None:
        """Return once the tensors of the newest save in the background are copied, and may change."""
        if self._saver is not None:
            self._saver.wait_until_staged()
            self._take(self._saver.finished())

    def finish(self) -> None:
        """Wait for the saves in the background; raises CheckpointError if the newest failed."""
        if self._saver is not None:
            self._take(self._saver.drain())
        if self._last_error is not None:
            raise CheckpointError(self._last_error)

    def close(self) -> None:
        """End the writer process."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def _take(self, ended: list[Finished]) -> None:
        for one in ended:
            self._last_error = one.error
            if one.error is None:
                self._committed()
            else:
                logger.error("checkpoint %s failed: %s", one.folder, one.error)

    def _committed(self) -> None:
        if self._rule is not None and GroupPeers(self._group).rank == 0:
            prune(self._run, self._rule)


def _encoded(values: dict[str, Any], what: str) -> str:
    """Return the JSON of now, since values may change; unlike that of the index it has NaN and infinity."""
    try:
        return json.dumps(values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} holds what JSON does not ({error}): leave it out, or convert it") from None


def _without_job_keys(text: str) -> str:
    """Return the message of a load without what it advises for runs of a job."""
    fact, _, _ = text.partition(": start a new run")
    return f"{fact.partition(': set [')[0]}: give load the keys, names and shapes that were saved"
