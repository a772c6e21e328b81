"""torch.distributed.checkpoint's planners over our own storage: which rank writes and reads which shard.

The planners handle any DTensor placement and any change of layout. torch's own storage has no checksums, uses pickle,
and reports a full disk as a RuntimeError, so writer.py and reader.py replace it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from meshwright.errors import CheckpointError

ProcessGroup = dist.ProcessGroup | None
"""The ranks that save or load together, a group with a CPU backend; None for all ranks."""


def has_group() -> bool:
    """Return whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, list[Tensor]]:
    """Return all copies of each tensor of nested dicts by path, such as optimizer/norm.weight/step.

    A list in `state` holds copies of one tensor on this rank, such as a tied embedding in two pipeline stages.
    """
    flat: dict[str, list[Tensor]] = {}
    for key, value in state.items():
        assert "/" not in key, f"a key of a training state contains a slash: {key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            copies = value if isinstance(value, list) else [value]
            for tensor in copies:
                assert isinstance(tensor, Tensor), f"{prefix}{key} is a {type(tensor).__name__}, not a tensor"
            flat[f"{prefix}{key}"] = [tensor.detach() for tensor in copies]
    return flat


@contextmanager
def one_error_for_all(action: str) -> Iterator[None]:
    """Turn errors of some ranks into one CheckpointError that every rank raises.

    A lost peer is not included: the collective itself raises.
    """
    with warnings.catch_warnings():
        # torch warns when there is only one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        # torch 2.13 deprecates collectives that its own object collectives call.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        try:
            yield
        except dcp.CheckpointException as exception:
            failures = {rank: failure[0] for rank, failure in exception.failures.items()}
            if any(isinstance(error, KeyboardInterrupt) for error in failures.values()):
                raise KeyboardInterrupt from exception
            raise CheckpointError(_explain(action, failures)) from exception


def raise_on_all(problem: str | None, group: ProcessGroup) -> None:
    """Raise CheckpointError on every rank if any rank has a problem; a collective."""
    problems = [problem]
    if has_group():
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    if found := list(dict.fromkeys(text for text in problems if text is not None)):
        raise CheckpointError("\n".join(found))


def held_by_any(names: Collection[str], held: Collection[str], group: ProcessGroup) -> set[str]:
    """Return those of `names`, equal on all ranks, that some rank holds; a collective."""
    ordered = sorted(names)
    is_held = torch.tensor([name in held for name in ordered], dtype=torch.uint8)
    if has_group():
        dist.all_reduce(is_held, op=dist.ReduceOp.MAX, group=group)
    return {name for name, found in zip(ordered, is_held.tolist(), strict=True) if found}


def _explain(action: str, failures: dict[int, BaseException]) -> str:
    """Return one line per distinct reason, with its ranks."""
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, error in sorted(failures.items()):
        ranks_by_reason.setdefault(_reason(error), []).append(rank)
    lines = []
    for reason, ranks in ranks_by_reason.items():
        where = f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
        lines.append(f"{action} on {where}: {reason}")
    return "\n".join(lines)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error} ({error.filename})" if error.filename else str(error.strerror or error)
    return f"{type(error).__name__}: {error}"
