"""CheckpointFolder: checkpoints of a training loop of your own, on any number of ranks, with any sharding.

folder = CheckpointFolder("runs/mine", keep=3)
state = {"model": model, "optimizer": optimizer, "epoch": 0}
loaded = folder.load(state)
folder.save(state, step)
"""

import atexit
import json
import operator
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from meshwright.checkpoint.background.saver import BackgroundSaver, Finished
from meshwright.checkpoint.checkpoint import load, newest_intact, read_metadata, save
from meshwright.checkpoint.loop.agreement import (
    agreed_values,
    require_equal_replicas,
    require_same_place,
    share_sections,
)
from meshwright.checkpoint.loop.folder_lock import FolderLock
from meshwright.checkpoint.loop.loop_state import LoopState
from meshwright.checkpoint.peers import GroupPeers, ProcessGroup
from meshwright.checkpoint.prune import prune
from meshwright.errors import CheckpointError, ConfigError, DamagedCheckpoint
from meshwright.log import logger
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run
from meshwright.units import counted

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
    same state. A rank gives what it has: what several ranks give under one name must be equal, but for the buffers of
    modules, of which rank 0's are saved.
    """

    def __init__(self, folder: Path | str, *, keep: int | None = None, group: ProcessGroup = None) -> None:
        """`keep` is the number of newest checkpoints that stay, None for all; `group` the ranks, None for all.

        On GPUs the group needs a CPU backend, too: init_process_group("cpu:gloo,cuda:nccl").
        """
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ConfigError(f"keep = {keep!r} must be a whole number, 1 or more, or None to keep all")
        self._run, self._group = Run(_local_folder(folder)), group
        self._rule = None if keep is None else RetentionRule(keep=keep)
        self._lock = FolderLock(self._run)
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
        peers = GroupPeers(self._group)
        opened, folder, own = peers.on_all(lambda: self._asked(state, step, metadata))
        require_same_place(str(self._run.folder), int(folder.name.removeprefix("step-")), peers)
        values = agreed_values(opened, peers)
        require_equal_replicas(opened, peers)
        share_sections(opened, peers)
        peers.act_together(lambda: self._require_next(folder), on_rank=0)
        described = {"step": int(folder.name.removeprefix("step-")), _VALUES: json.dumps(values), _OWN: own}
        if background:
            # A forward changes buffers, such as running means, before the optimizer's step.
            self._background().save(folder, opened.tensors, described, opened.buffers)
        else:
            save(folder, opened.tensors, described, self._group)
            self._committed()

    def load(
        self, state: MutableMapping[str, Any], step: int | Literal["latest"] = "latest"
    ) -> LoadedCheckpoint | None:
        """Fill `state` from the checkpoint after `step`; a collective, which waits for saves in the background.

        "latest" takes the newest whose every byte is as it was saved, names what it skips, and returns None where there
        is none; `state` is then untouched. Under each key of `state` exactly the names that were saved must be there,
        but for an optimizer, which gets the state that was saved; the number of ranks and the sharding may differ.
        Raises CheckpointError on all ranks; of a state that does not fit nothing has changed.
        """
        peers = GroupPeers(self._group)
        if self._saver is not None:
            self._take(self._saver.drain())
        opened = peers.on_all(lambda: LoopState(state, is_filled=True))
        require_same_place(str(self._run.folder), step if step == "latest" else str(step), peers)

        def load_one(folder: Path) -> dict[str, Any]:
            return self._load_one(folder, opened, peers)

        if step == "latest":
            found = newest_intact(self._run, load_one, peers)
        else:
            folder = peers.on_all(lambda: self._existing(step))
            found = int(folder.name.removeprefix("step-")), load_one(folder)
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
        """End the writer process, and let other processes save into the folder."""
        self._lock.release()
        if self._saver is not None:
            self._saver.close()
            self._saver = None
            atexit.unregister(self._warn_of_lost_saves)

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

    def _asked(
        self, state: MutableMapping[str, Any], step: int, metadata: Mapping[str, Any] | None
    ) -> tuple[LoopState, Path, str]:
        """Return what this rank saves, where, and the caller's metadata as the JSON of now."""
        number = _number(step)
        if number < 0:
            raise ConfigError(f"step = {step} must be 0 or more")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ConfigError(f"metadata is a {type(metadata).__name__}, and must be a dict")
        opened = LoopState(state)
        _encoded(opened.values, "state")
        return opened, self._run.checkpoint(number), _encoded(metadata or {}, "metadata")

    def _require_next(self, folder: Path) -> None:
        """Hold the folder; raises ConfigError for a step before one that is there, which "latest" would take."""
        self._lock.take()
        newest, step = max(self.steps(), default=-1), int(folder.name.removeprefix("step-"))
        if step < newest:
            raise ConfigError(
                f"step {step} is before step-{newest} of {self._run.folder}, which a later load would take: remove the "
                "checkpoints after the one that was loaded, or save into another folder"
            )

    def _existing(self, step: Any) -> Path:
        number = _number(step)
        if number not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self._run.folder} has no checkpoint step-{number}; there are: {there}")
        return self._run.checkpoint(number)

    def _load_one(self, folder: Path, opened: LoopState, peers: GroupPeers) -> dict[str, Any]:
        def fits() -> None:
            metadata = read_metadata(folder)
            if _VALUES not in metadata:
                raise CheckpointError(f"{folder} was saved by a job, not by a CheckpointFolder: resume that job")
            opened.expect(json.loads(metadata[_VALUES]))

        peers.on_all(fits)
        share_sections(opened, peers)
        try:
            return load(folder, opened.tensors, self._group)
        except DamagedCheckpoint:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"the state does not fit: {_without_job_keys(str(error))}") from error

    def _background(self) -> BackgroundSaver:
        if self._saver is None:
            self._saver = BackgroundSaver(os.environ.get("MASTER_ADDR", "localhost"), group=self._group)
            atexit.register(self._warn_of_lost_saves)
        self._take(self._saver.finished())
        return self._saver

    def _warn_of_lost_saves(self) -> None:
        if self._saver is not None and (count := self._saver.num_in_flight):
            logger.error(
                "the program ends before %s of %s was committed: use CheckpointFolder in a `with`, or call finish()",
                *(counted(count, "save"), self._run.folder),
            )


def _local_folder(folder: Path | str) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"folder is a {type(folder).__name__}, and must be a path")
    if "://" in str(folder):
        raise ConfigError(
            f"folder = {str(folder)!r} is a URL, and must be a folder: save into one, and copy its checkpoints/step-N"
        )
    return Path(folder).expanduser()


def _number(step: Any) -> int:
    """Return a step as Python's int; NumPy's are whole numbers, too."""
    try:
        if not isinstance(step, bool):
            return operator.index(step)
    except TypeError:
        pass
    raise ConfigError(f'step = {step!r} must be a whole number, such as 100, or "latest" to load')


def _encoded(values: Mapping[str, Any], what: str) -> str:
    """Return the JSON of now, since values may change; unlike that of the index it has NaN and infinity."""
    try:
        return json.dumps(dict(values))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} holds what JSON does not ({error}): leave it out, or convert it") from None


def _without_job_keys(text: str) -> str:
    """Return the message of a load without what it advises for runs of a job."""
    fact, _, _ = text.partition(": start a new run")
    return f"{fact.partition(': set [')[0]}: give load the keys, names and shapes that were saved"
