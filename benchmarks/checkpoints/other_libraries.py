"""orbax-checkpoint and torch-checkpointing, where they are installed, each as its documentation says.

    pip install orbax-checkpoint==0.12.8 torch-checkpointing==0.1.1 jax

Neither is a dependency, and what they need is imported when a state of theirs is made.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

Tensors = dict[str, Tensor]


class Begun(NamedTuple):
    """A save in the background."""

    wait_until_staged: Callable[[], None]
    """Returns when the state may change."""
    is_done: Callable[[], bool]


class Orbax:
    """Tensors as jax arrays: those of all ranks, sharded by rows, in a process group; else of this process alone."""

    name, module = "orbax", "orbax"

    def __init__(self, tensors: Tensors) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        self._jax, self._orbax = import_module("jax"), import_module("orbax.checkpoint")
        if distributed.is_initialized():
            self._join()
        sharding = self._jax.sharding
        mesh = sharding.Mesh(self._jax.devices(), ("rank",))
        self._sharding = sharding.NamedSharding(mesh, sharding.PartitionSpec("rank"))
        make = self._jax.make_array_from_process_local_data
        self._arrays = {name: make(self._sharding, _local(tensor).numpy()) for name, tensor in tensors.items()}
        self._saver = self._orbax.Checkpointer(self._orbax.StandardCheckpointHandler())
        self._background = self._orbax.AsyncCheckpointer(self._orbax.StandardCheckpointHandler())
        self._waiting = ThreadPoolExecutor(1)

    def _join(self) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = [f"localhost:{free.getsockname()[1]}"]
        distributed.broadcast_object_list(address)
        self._jax.distributed.initialize(address[0], distributed.get_world_size(), distributed.get_rank())

    def save(self, folder: Path) -> None:
        """Save; orbax writes durably."""
        self._saver.save(folder.absolute(), args=self._orbax.args.StandardSave(self._arrays))

    def begin(self, folder: Path) -> Begun:
        """Begin a save in the background; arrays of jax never change."""
        self._background.save(folder.absolute(), args=self._orbax.args.StandardSave(self._arrays))
        return Begun(lambda: None, self._waiting.submit(self._background.wait_until_finished).done)

    def load(self, folder: Path) -> Tensors:
        """Return this rank's parts."""
        describe = self._jax.ShapeDtypeStruct
        target = {name: describe(a.shape, a.dtype, sharding=self._sharding) for name, a in self._arrays.items()}
        loaded = self._saver.restore(folder.absolute(), args=self._orbax.args.StandardRestore(target))
        return {name: torch.from_dlpack(array.addressable_data(0)) for name, array in loaded.items()}

    def close(self) -> None:
        """End what saves in the background."""
        self._background.close()
        self._waiting.shutdown()


class TorchCheckpointing:
    """Tensors as torch-checkpointing saves them on a CPU: a file a rank, no resharding, which gathers on CUDA only."""

    name, module = "torch-checkpointing", "torch_checkpointing"

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._package = tensors, import_module("torch_checkpointing")
        self._saver = self._manager(self._package.SyncCheckpointSaverConfig())
        self._background: Any = None

    def _manager(self, save: Any) -> Any:
        config = self._package.CheckpointManager.Config
        # Its direct writes fail on ext4: [Errno 22], as torch.save's pieces are not aligned.
        storage = import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig
        return self._package.CheckpointManager(config(save=save, storage_config=storage(use_direct_io=False)))

    def save(self, folder: Path) -> None:
        """Save, and fsync this rank's file, which the library does not."""
        self._saver.save(str(folder), {"model": self._tensors})
        rank = 0
        if distributed.is_initialized():
            rank = distributed.get_rank()
            # On other ranks it returns before rank 0 has given the folder its name.
            distributed.barrier()
        with (folder / f"model_{rank}.pt").open("rb") as file:
            os.fsync(file.fileno())

    def begin(self, folder: Path) -> Begun:
        """Begin a save in the background; the first starts its process."""
        if self._background is None:
            on_cpu = {"use_pinned_memory": False, "use_non_blocking_copy": False}
            staging = self._package.CheckpointStagerConfig(**on_cpu)
            self._background = self._manager(self._package.AsyncCheckpointSaverConfig(staging_config=staging))
        written = self._background.save(str(folder), {"model": self._tensors})

        def wait() -> None:
            with self._background.lock():
                pass

        return Begun(wait, written.done)

    def load(self, folder: Path) -> Tensors:
        """Return this rank's parts."""
        into = {name: torch.zeros_like(tensor) for name, tensor in self._tensors.items()}
        self._saver.load(str(folder), into={"model": into}, strict=True)
        return {name: _local(tensor) for name, tensor in into.items()}

    def close(self) -> None:
        """End what saves in the background."""
        self._saver.close()
        if self._background is not None:
            self._background.close()


Library = Orbax | TorchCheckpointing
LIBRARIES: tuple[type[Library], ...] = (Orbax, TorchCheckpointing)


def installed() -> list[type[Library]]:
    """Return those that can be imported."""
    return [library for library in LIBRARIES if find_spec(library.module) is not None]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
