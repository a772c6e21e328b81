"""Attention of a sequence that ranks share is CausalAttention of the whole one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.models.attention import CausalAttention
from meshwright.parallelism.context import apply_context_parallel
from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.sequence_split import sequence_indices
from meshwright.spec.layout import ContextMethod, Layout
from run_ranks import run_ranks

SEQ_LEN = 64
NAMES = ("out", "query gradient", "key gradient", "value gradient")


@dataclass(frozen=True)
class Case:
    """One attention: its heads, widths, documents and dtype."""

    name: str
    num_heads: int = 4
    num_kv_heads: int = 4
    value_width: int = 8
    scale: float | None = None
    document_starts: tuple[int, ...] | None = None
    """Where the second row's documents begin; the first row's are shifted by one."""

    def documents(self) -> Tensor | None:
        """Return documents_BS of the whole sequence."""
        if self.document_starts is None:
            return None
        begins = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
        for start in self.document_starts:
            begins[0, (start + 1) % SEQ_LEN] = begins[1, start] = 1
        return begins.cumsum(1)


CASES = (
    Case("plain"),
    Case("grouped", num_kv_heads=2),
    Case("one key head", num_kv_heads=1, scale=0.2),
    Case("narrow values", value_width=6),
    Case("wide values", value_width=12, num_kv_heads=2),
    Case("documents", document_starts=(3, 10, 11, 24)),
    # With 4 ranks a chunk has 4 positions: most pairs of chunks have nothing to do with each other.
    Case("short documents", document_starts=tuple(range(0, SEQ_LEN, 4)), num_kv_heads=2, value_width=6),
)


class Model(nn.Module):
    """The least that context parallelism takes."""

    takes_positions = True

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.core = CausalAttention(scale)


def tensors_of(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key, value and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(case.num_heads, 8), (case.num_kv_heads, 8), *[(case.num_kv_heads, case.value_width)]]
    shapes.append((case.num_heads, case.value_width))
    return [torch.randn(2, SEQ_LEN, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def attend(core: nn.Module, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Return the output and the gradients of query, key and value."""
    *inputs, gradient = tensors
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = core(*leaves, documents)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def worst_differences(layout: dict[str, Any], dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Return by case and by name the largest difference from one process, 0 where all bits are equal."""
    torch.set_num_threads(1)
    parsed = Layout(**layout)
    meshes = build_meshes(parsed, "cpu")
    positions = sequence_indices(SEQ_LEN, meshes.rank("cp"), parsed.cp, parsed.cp_method)
    worst = {}
    for case in CASES:
        model, whole, documents = Model(case.scale), tensors_of(case, dtype), case.documents()
        expected = attend(model.core, whole, documents)
        apply_context_parallel(model, meshes, SEQ_LEN)
        mine = [tensor[:, positions] for tensor in whole]
        given = attend(model.core, mine, None if documents is None else documents[:, positions])
        pairs = zip(NAMES, given, expected, strict=True)
        worst[case.name] = {name: (a - b[:, positions]).abs().max().item() for name, a, b in pairs}
    return worst


@pytest.mark.parametrize("method", ["all-gather", "ring", "ulysses"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 5e-6)], ids=str)
def test_attention_is_that_of_one_process(method: ContextMethod, cp: int, dtype: torch.dtype, tolerance: float) -> None:
    for worst in run_ranks(worst_differences, cp, {"cp": cp, "cp_method": method}, dtype):
        assert {name: w for name, w in worst.items() if max(w.values()) > tolerance} == {}
