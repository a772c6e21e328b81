"""Timings of tiny steps: host overhead per kernel, and the cost of FSDP."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.calibrator.timing import Stopwatch
from meshwright.models.llama import LlamaBlock
from meshwright.models.rope import rope_tables
from meshwright.parallelism.torch_private.torch_dispatch import count_kernels
from meshwright.spec.model.architecture import LlamaArchitecture

BlockStep = Literal["plain", "gathered", "reduced"]
"""Unsharded; sharded by FSDP with all-gathers in forward and backward; with reduction of gradients too."""

NUM_BLOCKS = 4
"""Blocks of each of these steps."""

# Few for CPU-bound steps; many to keep cores busy during all-gathers, as in training.
_FEW_TOKENS, _MANY_TOKENS = 4, 128
_SMALLEST_WIDTH = 32


def host_seconds(watch: Stopwatch) -> float:
    """Return host seconds per kernel of an eager model, forward and backward, with modules and autograd.

    Measured on blocks so narrow that they are CPU-bound; views are not kernels.
    """
    step, counted = (_Step(_SMALLEST_WIDTH, _FEW_TOKENS, device) for device in (watch.device, torch.device("cpu")))
    return watch.seconds(step) / count_kernels(counted)


def block_step_seconds(widths: tuple[int, ...], watch: Stopwatch) -> dict[tuple[BlockStep, int], float]:
    """Return the seconds of a step of NUM_BLOCKS blocks, by (sharding, bytes of one block)."""
    took_s: dict[tuple[BlockStep, int], float] = {}
    for width in widths:
        plain, sharded = (_Step(width, _MANY_TOKENS, watch.device) for _ in range(2))
        num_bytes = sum(parameter.nbytes for parameter in plain.blocks.each[0].parameters())
        _shard(sharded.blocks, watch.device)
        took_s["plain", num_bytes] = watch.seconds(plain)
        _reduce(sharded.blocks, is_on=False)
        took_s["gathered", num_bytes] = watch.seconds(sharded)
        _reduce(sharded.blocks, is_on=True)
        took_s["reduced", num_bytes] = watch.seconds(sharded)
    return took_s


class _Step:
    """Callable: forward and backward of a few blocks of Llama on `num_tokens` tokens."""

    def __init__(self, width: int, num_tokens: int, device: torch.device) -> None:
        architecture = LlamaArchitecture(
            vocab_size=32,
            dim=width,
            num_layers=NUM_BLOCKS,
            num_heads=4,
            num_kv_heads=2,
            head_dim=width // 4,
            ffn_dim=4 * width,
            max_seq_len=num_tokens,
        )
        self.blocks = _Blocks(architecture).to(device)
        self._turns = rope_tables(architecture, torch.arange(num_tokens, device=device))
        self._x_BSD = torch.randn(1, num_tokens, width, device=device)

    def __call__(self) -> None:
        self.blocks(self._x_BSD, *self._turns).sum().backward()


class _Blocks(nn.Module):
    """Sequence of Llama blocks: the FSDP root, without parameters of its own.

    Not a ModuleList, which fully_shard() rejects up to torch 2.11, even with a forward.
    """

    def __init__(self, architecture: LlamaArchitecture) -> None:
        super().__init__()
        self.each = nn.ModuleList(LlamaBlock(architecture) for _ in range(architecture.num_layers))

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        """Return x_BSD after all blocks."""
        for block in self.each:
            x_BSD = block(x_BSD, cos_SH, sin_SH)
        return x_BSD


def _shard(blocks: _Blocks, device: torch.device) -> None:
    """Shard as in parallelism/data/fully_sharded.py: prefetch of one block, sums without division."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    units: list[FSDPModule] = [fully_shard(block, mesh=mesh, reshard_after_forward=True) for block in blocks.each]
    fully_shard(blocks, mesh=mesh)
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for before, after in itertools.pairwise(units):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _reduce(blocks: nn.Module, *, is_on: bool) -> None:
    assert isinstance(blocks, FSDPModule)
    blocks.set_requires_gradient_sync(is_on)
    # As between microbatches: parameters are resharded after backward.
    blocks.set_reshard_after_backward(True)
