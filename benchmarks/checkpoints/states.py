"""Training states for the benchmarks, and how each format saves and loads them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.checkpoint.checkpoint import load, save

State = dict[str, dict[str, Any]]
NUM_TENSORS = 12


class Format(NamedTuple):
    """One way to save a state into a folder and to load it in place."""

    name: str
    save: Callable[[Path, State], None]
    load: Callable[[Path, State], None]


def make_state(seed: int, num_elements: int, *, num_ranks: int = 1) -> State:
    """Return tensors of about `num_elements` in all, sharded if there are several ranks, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(2, num_elements // NUM_TENSORS // 256)
    tensors: dict[str, Tensor] = {f"w{i}": torch.randn(rows, 256, generator=generator) for i in range(NUM_TENSORS)}
    if num_ranks > 1:
        mesh = init_device_mesh("cpu", (num_ranks,))
        tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    return {"model": tensors}


def zeros_like(state: State) -> State:
    """Return a state of the same tensors, all zero."""
    return {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}


def equal(left: State, right: State) -> bool:
    """Return whether all bits agree."""
    return all(
        torch.equal(a.view(torch.uint8), right["model"][name].view(torch.uint8)) for name, a in left["model"].items()
    )


def _save_ours(folder: Path, state: State) -> None:
    save(folder, state, {"step": 1})


def _load_ours(folder: Path, state: State) -> None:
    load(folder, state)


def _save_dcp(folder: Path, state: State) -> None:
    dcp.save(state["model"], checkpoint_id=folder)


def _load_dcp(folder: Path, state: State) -> None:
    dcp.load(state["model"], checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())


def _save_safetensors(folder: Path, state: State) -> None:
    """Write one file for each third of the tensors, as a folder of a large model has."""
    folder.mkdir(parents=True)
    names = sorted(state["model"])
    for part in range(3):
        own = {name: state["model"][name] for name in names[part::3]}
        save_file(own, folder / f"model-{part + 1:05d}-of-00003.safetensors", metadata={"format": "pt"})


def _load_safetensors(folder: Path, state: State) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            state["model"][name].copy_(tensor)


OURS = Format("meshwright", _save_ours, _load_ours)
DCP = Format("torch DCP", _save_dcp, _load_dcp)
SAFETENSORS = Format("safetensors", _save_safetensors, _load_safetensors)


def save_on_this_rank(name: str, folder: Path, seed: int, num_elements: int) -> None:
    """Save a sharded state; a function for ranks."""
    chosen = {each.name: each for each in (OURS, DCP)}[name]
    chosen.save(folder, make_state(seed, num_elements, num_ranks=torch.distributed.get_world_size()))


def fresh_copy(source: Path, target: Path) -> None:
    """Make `target` a copy of `source`."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def drop_cached(folder: Path) -> None:
    """Drop what the page cache holds of the files in `folder`, which must be on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
