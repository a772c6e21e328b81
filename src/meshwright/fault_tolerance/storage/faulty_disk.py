"""FaultyDisk: calls of this process on the files of a run's checkpoints, some of which fail.

It replaces open, fsync, rename, mkdir, unlink and rmdir of this process; files of checkpoints that are opened meanwhile
also count their writes and reads. So a call fails in the process that makes it, before the kernel sees it.
"""

import errno
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from meshwright.fault_tolerance.injection.injection_note import note_injection
from meshwright.spec.fault import Fault
from meshwright.spec.run.run import Run

_READS: Final = ("read",)
_NEED_SPACE: Final = ("open", "write", "mkdir", "fsync")
_START_SAVE: Final = ("open", "mkdir")
_PATCHED: Final = ("fsync", "rename", "mkdir", "unlink", "rmdir")


@dataclass
class _Pending:
    """A fault that has not ended, and how far it has come."""

    number: int
    fault: Fault
    save: str | None = None
    """Name of the temporary folder of the save that it befalls, once that has started."""
    num_calls: int = 0
    is_noted: bool = False

    @property
    def is_of_restore(self) -> bool:
        return self.fault.phase == "restore"


class FaultyDisk:
    """The disk under one process; use it in a `with`."""

    def __init__(self, run: Run, faults: Mapping[int, Fault], last_step: int) -> None:
        """`faults` by their number; `last_step` is the furthest that an earlier attempt came."""
        self._run = run
        self._checkpoints = os.path.abspath(run.checkpoints)
        self._pending = [
            _Pending(number, fault)
            for number, fault in faults.items()
            if not run.injected_fault(number).exists()
            and (fault.phase != "restore" or 0 < (fault.step or 1) <= last_step)
        ]
        self._lock = threading.RLock()
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _PATCHED}
        self._open = io.open

    def __enter__(self) -> Self:
        io.open = self._open_file
        for name in _PATCHED:
            setattr(os, name, self._counting(name))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        io.open = self._open
        for name, real in self._real.items():
            setattr(os, name, real)

    def before_call(self, name: str, path: str) -> None:
        """Make happen what befalls a call on `path`, a file or folder of a checkpoint, that is about to be made."""
        if path == self._checkpoints and name != "fsync":
            return
        with self._lock:
            for one in list(self._pending):
                if one.is_of_restore == (name in _READS) and self._has_started(one, name, path):
                    one.num_calls += 1
                    self._befall(one, name, path)

    def _has_started(self, one: _Pending, name: str, path: str) -> bool:
        """Return whether the save or restore of `one` has started by this call."""
        if one.is_of_restore or one.save is not None:
            return True
        folder = self._folder_of(path)
        step = folder.removeprefix("step-").partition(".tmp-")[0]
        if name in _START_SAVE and ".tmp-" in folder and step.isdigit() and int(step) >= (one.fault.step or 1):
            one.save = folder
        return one.save is not None

    def _befall(self, one: _Pending, name: str, path: str) -> None:
        fault = one.fault
        if fault.kind == "slow-disk":
            if fault.step is not None and not one.is_of_restore and self._is_of_later_save(one, name, path):
                self._pending.remove(one)
                return
            self._note(one, name, path)
            time.sleep(fault.argument)
        elif one.num_calls < fault.argument:
            return
        elif fault.kind == "no-space":
            if one.is_noted and self._is_of_later_save(one, name, path):
                self._pending.remove(one)
            elif name in _NEED_SPACE:
                one.save = one.save if one.is_noted else self._folder_of(path)
                self._note(one, name, path)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        else:
            self._note(one, name, path)
            self._pending.remove(one)
            if fault.kind == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _is_of_later_save(self, one: _Pending, name: str, path: str) -> bool:
        folder = self._folder_of(path)
        return name in _START_SAVE and ".tmp-" in folder and folder != one.save

    def _note(self, one: _Pending, name: str, path: str) -> None:
        if one.is_noted:
            return
        one.is_noted = True
        step = self._folder_of(path).removeprefix("step-").partition(".")[0]
        mark = f"{name} of {Path(path).name}"
        note_injection(self._run, one.number, int(step) if step.isdigit() else one.fault.step or 0, mark)

    def _folder_of(self, path: str) -> str:
        return path.removeprefix(self._checkpoints).lstrip("/").partition("/")[0]

    def _inside(self, path: Any, folder: int | None = None) -> str | None:
        """Return the absolute path of a file or descriptor of a checkpoint, None for any other."""
        try:
            text = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            if folder is not None:
                text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
            text = os.path.abspath(text)
        except (OSError, TypeError):
            return None
        return text if text == self._checkpoints or text.startswith(f"{self._checkpoints}/") else None

    def _counting(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if (inside := self._inside(path, options.get("dir_fd"))) is not None:
                self.before_call(name, inside)
            return real(path, *arguments, **options)

        return call

    def _open_file(self, file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
        inside = self._inside(file)
        if inside is None or "+" in mode:
            return self._open(file, mode, buffering, *arguments, **options)
        writes = bool(set(mode) & set("wxa"))
        if writes:
            self.before_call("open", inside)
        raw = _CountedFile(self, inside, mode.replace("b", "").replace("t", ""))
        if "b" in mode and buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw) if writes else io.BufferedReader(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *arguments, **options)


class _CountedFile(io.FileIO):
    """A file of a checkpoint whose writes and reads the disk knows of."""

    def __init__(self, disk: FaultyDisk, path: str, mode: str) -> None:
        super().__init__(path, mode)
        self._disk, self._path = disk, path

    def write(self, data: Any) -> int:
        self._disk.before_call("write", self._path)
        return super().write(data)

    def readinto(self, into: Any) -> int:
        self._disk.before_call("read", self._path)
        return super().readinto(into)

    def readall(self) -> bytes:
        self._disk.before_call("read", self._path)
        return super().readall()
