"""Objects of other ranks, unpickled only with a proof that they are of this job.

Unpickling runs code that the bytes name, and gloo takes bytes from the first that connects. So each rank sends its
object with an HMAC under the job's token, and none is looked at before its proof is verified.

The token is in MESHWRIGHT_JOB_TOKEN, new with each start of `meshwright train`. Where it is not set, as under torchrun,
ranks agree on one over their store: then it is known to all that the store answers.
"""

import hashlib
import hmac
import os
import pickle
import secrets
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import Store, distributed_c10d

from meshwright.errors import LostPeer

TOKEN_VARIABLE: Final = "MESHWRIGHT_JOB_TOKEN"
_KEY: Final = "meshwright/job-token"
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_MAX_BYTES: Final = 1 << 30
"""Of one object. Without a limit a false size would take any amount of memory."""
_agreed: tuple[Store, str] | None = None
"""The token of ranks without MESHWRIGHT_JOB_TOKEN, and the store over which they agreed on it."""


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's `value`, by rank of the group, which needs a CPU backend; a collective.

    Raises LostPeer where what came for a rank is not of this job.
    """
    num_ranks = dist.get_world_size(group)
    own = signed(value, dist.get_rank(group))
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    lengths = [_checked(int(size), rank) for rank, size in enumerate(sizes)]
    received = [torch.empty(max(lengths), dtype=torch.uint8) for _ in range(num_ranks)]
    dist.all_gather(received, _padded(own, max(lengths)), group=group)
    return [verified(data[:length], rank) for rank, (data, length) in enumerate(zip(received, lengths, strict=True))]


def broadcast_object(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the `value` of the group's rank 0 on every rank; a collective. Raises LostPeer as gather_objects."""
    if dist.get_rank(group) == 0:
        data = signed(value, 0)
        dist.broadcast(torch.tensor([data.numel()]), group=group, group_src=0)
        dist.broadcast(data, group=group, group_src=0)
        return value
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, group=group, group_src=0)
    data = torch.empty(_checked(int(size), 0), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return verified(data, 0)


def collect_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's `value` on the group's rank 0, [] elsewhere; a collective. Raises LostPeer there."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    own = signed(value, rank)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    lengths = [_checked(int(size), of) for of, size in enumerate(sizes)]
    is_first = rank == 0
    received = [torch.empty(max(lengths), dtype=torch.uint8) for _ in range(num_ranks)] if is_first else None
    dist.gather(_padded(own, max(lengths)), received, group=group, group_dst=0)
    return [verified(data[:length], of) for of, (data, length) in enumerate(zip(received or [], lengths, strict=False))]


def signed(value: Any, rank: int) -> Tensor:
    """Return a proof and the pickled `value`, as bytes."""
    data = pickle.dumps(value)
    return torch.frombuffer(bytearray(_proof(rank, data) + data), dtype=torch.uint8)


def verified(data: Tensor, rank: int) -> Any:
    """Return what a rank `signed`; raises LostPeer, and does not unpickle, where another process sent it."""
    content = data.numpy().tobytes()
    proof, pickled = content[:_PROOF_BYTES], content[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(rank, pickled)):
        raise LostPeer(
            f"what came from rank {rank} has no proof of this job's token: another process has connected in its place, "
            f"or {TOKEN_VARIABLE} is not the same on all ranks"
        )
    return pickle.loads(pickled)


def _proof(rank: int, data: bytes) -> bytes:
    # With the rank: one rank's object would do as another's otherwise.
    return hmac.new(_token().encode(), f"object of rank {rank} ".encode() + data, hashlib.sha256).digest()


def _token() -> str:
    """Return the job's token; where it has none, the one on which the ranks of this store agree."""
    global _agreed
    if (given := os.environ.get(TOKEN_VARIABLE)) is not None:
        return given
    store: Store = distributed_c10d._get_default_store()
    if _agreed is None or _agreed[0] is not store:
        # The first of them wins.
        _agreed = (store, store.compare_set(_KEY, "", secrets.token_hex(32)).decode())
    return _agreed[1]


def _checked(num_bytes: int, rank: int) -> int:
    if _PROOF_BYTES < num_bytes <= _MAX_BYTES:
        return num_bytes
    raise LostPeer(f"rank {rank} announces an object of {num_bytes} bytes: at most {_MAX_BYTES} are accepted")


def _padded(data: Tensor, length: int) -> Tensor:
    return torch.cat([data, torch.zeros(length - data.numel(), dtype=torch.uint8)])
