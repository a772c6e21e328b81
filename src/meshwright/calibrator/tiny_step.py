"""Seconds of steps with next to no tokens in them: the host's part of any step, and what FSDP adds to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.calibrator.timing import Stopwatch
from meshwright.models.llama import Block
from meshwright.models.rope import rope_tables
from meshwright.parallelism.torch_kernel_count import count_kernels
from meshwright.spec.architecture import LlamaArchitecture
from meshwright.spec.measured import CollectiveKind

_NUM_BLOCKS, _NUM_TOKENS = 4, 4
_SMALLEST_WIDTH = 32


def host_seconds(watch: Stopwatch) -> float:
    """Return the host's seconds for each kernel of an eager model, forward and backward, modules and autograd included.

    From blocks so narrow that their time is the host's; views are no kernels.
    """
    return watch.seconds(_Step(_SMALLEST_WIDTH, watch.device)) / count_kernels(_Step(_SMALLEST_WIDTH, "cpu"))


def unit_seconds(widths: tuple[int, ...], watch: Stopwatch) -> dict[tuple[CollectiveKind, int, int], float]:
    """Return what FSDP adds for each "unshard" of a block and each "reduce-grads", by (kind, ranks, bytes of a block).

    From steps of the same blocks: plain; sharded, without reductions; and sharded with them.
    """
    seconds: dict[tuple[CollectiveKind, int, int], float] = {}
    for width in widths:
        plain, sharded = _Step(width, watch.device), _Step(width, watch.device)
        at = dist.get_world_size(), sum(parameter.nbytes for parameter in plain.blocks[0].parameters())
        plain_s = watch.seconds(plain)
        _shard(sharded.blocks, watch.device)
        _reduce(sharded.blocks, is_on=False)
        gathered_s = watch.seconds(sharded)
        _reduce(sharded.blocks, is_on=True)
        reduced_s = watch.seconds(sharded)
        # Each block is gathered for forward and for backward, and reduced once.
        seconds["unshard", *at] = (gathered_s - plain_s) / (2 * _NUM_BLOCKS)
        seconds["reduce-grads", *at] = (reduced_s - gathered_s) / _NUM_BLOCKS
    return seconds


class _Step:
    """Callable: forward and backward of a few blocks of Llama on a few tokens."""

    def __init__(self, width: int, device: torch.device | str) -> None:
        architecture = LlamaArchitecture(
            vocab_size=32,
            dim=width,
            num_layers=_NUM_BLOCKS,
            num_heads=4,
            num_kv_heads=2,
            head_dim=width // 4,
            ffn_dim=4 * width,
            max_seq_len=_NUM_TOKENS,
        )
        blocks = [Block(architecture).to(device) for _ in range(_NUM_BLOCKS)]
        self.blocks = nn.Sequential(*blocks)
        self._turns = rope_tables(architecture, torch.arange(_NUM_TOKENS, device=device))
        self._x_BSD = torch.randn(1, _NUM_TOKENS, width, device=device)

    def __call__(self) -> None:
        x_BSD: Tensor = self._x_BSD
        for block in self.blocks:
            x_BSD = block(x_BSD, *self._turns)
        x_BSD.sum().backward()


def _shard(blocks: nn.Sequential, device: torch.device) -> None:
    """Shard as training does (parallelism/fully_sharded.py): sums that stay sums."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
        assert isinstance(block, FSDPModule)
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)


def _reduce(blocks: nn.Sequential, *, is_on: bool) -> None:
    for block in blocks:
        assert isinstance(block, FSDPModule)
        block.set_requires_gradient_sync(is_on)
