"""Attention of a sequence that ranks share is CausalAttention of the whole one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.errors import MeshwrightError
from meshwright.models.attention.causal_attention import CausalAttention
from meshwright.parallelism.activation_checkpoint import checkpoint_blocks
from meshwright.parallelism.compile_blocks import compile_blocks
from meshwright.parallelism.context.context_parallel import apply_context_parallel, sequence_indices
from meshwright.parallelism.context.ring_attention import RingAttention
from meshwright.parallelism.mesh import Meshes, build_meshes
from meshwright.spec.layout.layout import ContextMethod, Layout
from run_ranks import run_ranks

SEQ_LEN = 64
METHODS: tuple[ContextMethod, ...] = ("all-gather", "ring", "ulysses")
NAMES = ("out", "query gradient", "key gradient", "value gradient")


@dataclass(frozen=True)
class Case:
    """One attention: its heads, widths, documents and dtype."""

    name: str
    num_heads: int = 4
    num_kv_heads: int = 4
    width: int = 8
    value_width: int | None = None
    scale: float | None = None
    document_starts: tuple[int, ...] | None = None
    """Where the second row's documents begin; the first row's are shifted by one."""
    window: int | None = None
    has_sinks: bool = False

    def sinks(self, dtype: torch.dtype) -> Tensor | None:
        """Return sinks_N, those of all ranks."""
        return torch.linspace(-1, 1, self.num_heads, dtype=dtype) if self.has_sinks else None

    def tensors(self, dp_rank: int, dtype: torch.dtype) -> list[Tensor]:
        """Return query, key, value and the gradient of the output, of a data-parallel rank's whole sequences."""
        generator = torch.Generator().manual_seed(dp_rank)
        value_width = self.value_width or self.width
        shapes = [(self.num_heads, self.width), (self.num_kv_heads, self.width)]
        shapes += [(self.num_kv_heads, value_width), (self.num_heads, value_width)]
        return [torch.randn(2, SEQ_LEN, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]

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
    # With 4 ranks each has 3 query heads, which look at 2 key heads unevenly.
    Case("key heads cut in two", num_heads=12, num_kv_heads=6),
    Case("narrow values", value_width=6),
    Case("wide values", value_width=12, num_kv_heads=2),
    Case("documents", document_starts=(3, 10, 11, 24)),
    # With 4 ranks a chunk has 8 positions: most pairs of chunks have nothing to do with each other.
    Case("short documents", document_starts=tuple(range(0, SEQ_LEN, 4)), num_kv_heads=2, value_width=6),
)
# A ring has neither.
WINDOWS_AND_SINKS = (
    Case("window", num_kv_heads=2, window=7),
    Case("window over shards, documents", window=20, document_starts=(3, 10, 11, 24)),
    Case("sinks", num_kv_heads=2, value_width=6, has_sinks=True),
    Case("sinks and window", num_kv_heads=1, window=5, has_sinks=True, document_starts=(9,)),
)


class Model(nn.Module):
    """The least that context parallelism takes."""

    takes_positions = True

    def __init__(self, scale: float | None, window: int | None = None) -> None:
        super().__init__()
        self.core = CausalAttention(scale, window)


class Silent(nn.Module):
    """A model without attention of ours."""

    takes_positions = True


def attend(
    core: nn.Module, tensors: list[Tensor], documents: Tensor | None, sinks: Tensor | None = None
) -> list[Tensor]:
    """Return the output and the gradients of query, key and value."""
    *inputs, gradient = tensors
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = core(*leaves, documents, sinks)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def shared_core(meshes: Meshes, scale: float | None, window: int | None = None) -> nn.Module:
    """Return the attention that takes the place of a model's, recomputed and compiled as the layout says."""
    model, layout = Model(scale, window), meshes.layout
    apply_context_parallel(model, meshes, SEQ_LEN)
    blocks = nn.ModuleList([model.core])
    checkpoint_blocks(blocks, layout)
    if layout.compile:
        torch._dynamo.reset()
        compile_blocks(blocks, layout)
    return blocks[0]


def worst_differences(
    layout: dict[str, Any], dtype: torch.dtype, cases: tuple[Case, ...] = CASES
) -> dict[str, dict[str, float]]:
    """Return by case and by name the largest difference from one process as a share of its largest value."""
    torch.set_num_threads(1)
    meshes = build_meshes(Layout(**layout), "cpu")
    cp, method = meshes.layout.cp, meshes.layout.cp_method
    positions = sequence_indices(SEQ_LEN, meshes.rank("cp"), cp, method)
    worst = {}
    for case in cases:
        whole, documents = case.tensors(meshes.dp_rank, dtype), case.documents()
        expected = attend(CausalAttention(case.scale, case.window), whole, documents, case.sinks(dtype))
        mine = [tensor[:, positions] for tensor in whole]
        core = shared_core(meshes, case.scale, case.window)
        own_documents = None if documents is None else documents[:, positions]
        given = attend(core, mine, own_documents, case.sinks(dtype))
        pairs = zip(NAMES, given, expected, strict=True)
        worst[case.name] = {name: ((a - b[:, positions]).abs().max() / b.abs().max()).item() for name, a, b in pairs}
    return worst


def assert_close(by_rank: list[dict[str, dict[str, float]]], tolerance: float) -> None:
    for rank, worst in enumerate(by_rank):
        # Not by max, which may pass over what is no number.
        far = {case: each for case, each in worst.items() if not all(value <= tolerance for value in each.values())}
        assert far == {}, f"rank {rank}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-13),
        pytest.param(torch.float32, 1e-6, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, 0.02, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_attention_is_that_of_one_process(method: ContextMethod, cp: int, dtype: torch.dtype, tolerance: float) -> None:
    assert_close(run_ranks(worst_differences, cp, {"cp": cp, "cp_method": method}, dtype), tolerance)


@pytest.mark.parametrize("method", ["all-gather", "ulysses"])
@pytest.mark.parametrize("cp", [2, 4])
def test_windows_and_sinks_are_those_of_one_process(method: ContextMethod, cp: int) -> None:
    layout = {"cp": cp, "cp_method": method}
    assert_close(run_ranks(worst_differences, cp, layout, torch.float64, WINDOWS_AND_SINKS), 1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_the_ranks_of_other_samples_are_left_alone(method: ContextMethod) -> None:
    # Two groups of two ranks, each with its own samples: a peer counted in the world is another group's, or none.
    layout = {"dp_shard": 2, "cp": 2, "cp_method": method}
    assert_close(run_ranks(worst_differences, 4, layout, torch.float64), 1e-13)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", [pytest.param("full", marks=pytest.mark.long), "selective"])
def test_recomputation_changes_nothing(method: ContextMethod, policy: str) -> None:
    layout = {"cp": 4, "cp_method": method, "activation_checkpoint": policy}
    assert_close(run_ranks(worst_differences, 4, layout, torch.float64), 1e-13)


def _num_batches(policy: str) -> int:
    """Return how often a rank sends to others in a forward and a backward pass."""
    torch.set_num_threads(1)
    meshes = build_meshes(Layout(cp=4, cp_method="ring", activation_checkpoint=policy), "cpu")
    positions = sequence_indices(SEQ_LEN, meshes.rank("cp"), 4, "ring")
    core = shared_core(meshes, None)
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as sends:
        attend(core, [tensor[:, positions] for tensor in CASES[0].tensors(0, torch.float32)], None)
    return sends.call_count


def test_selective_recomputation_keeps_what_a_ring_came_to() -> None:
    none, selective, full = (run_ranks(_num_batches, 4, policy) for policy in ("none", "selective", "full"))
    # Keys go three steps forward and backward, their gradients four.
    assert (none, selective, full) == ([10] * 4, [10] * 4, [13] * 4)


@DYNAMO_WARNINGS
@pytest.mark.long
@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("method", ["all-gather", "ulysses"])
def test_one_graph_holds_all_but_a_ring(method: ContextMethod, policy: str) -> None:
    layout = {"cp": 2, "cp_method": method, "compile": True, "compile_backend": "aot_eager"}
    cases = tuple(case for case in CASES if case.name in ("grouped", "short documents"))
    by_rank = run_ranks(worst_differences, 2, {**layout, "activation_checkpoint": policy}, torch.float64, cases)
    assert_close(by_rank, 1e-13)


def test_a_ring_stays_out_of_the_compiler() -> None:
    assert RingAttention.is_eager
    layout = {"cp": 2, "cp_method": "ring", "compile": True, "compile_backend": "aot_eager"}
    assert_close(run_ranks(worst_differences, 2, layout, torch.float64, CASES[:1]), 1e-13)


def test_ulysses_changes_no_bit() -> None:
    # Key heads that several ranks need have gradients that are sums over them, in another order.
    whole_heads = tuple(case for case in CASES if case.num_kv_heads % 2 == 0)
    for worst in run_ranks(worst_differences, 2, {"cp": 2, "cp_method": "ulysses"}, torch.float32, whole_heads):
        assert {case: max(each.values()) for case, each in worst.items()} == {case.name: 0.0 for case in whole_heads}


def test_gathering_changes_no_bit_of_what_a_query_gets() -> None:
    # The kernel takes 16 queries at once and more: chunks that are multiples of it are computed as in the whole.
    cases = (Case("plain", width=16), Case("grouped", num_kv_heads=2, width=16))
    for worst in run_ranks(worst_differences, 2, {"cp": 2}, torch.float32, cases):
        assert {worst[case.name][name] for case in cases for name in NAMES[:2]} == {0.0}


def _refusal(layout: dict[str, Any], seq_len: int, kind: str) -> str:
    meshes = build_meshes(Layout(**layout), "cpu")
    model: nn.Module = {"ours": Model(None), "no attention": Silent(), "no positions": nn.Linear(1, 1)}[kind]
    try:
        apply_context_parallel(model, meshes, seq_len)
        model.core(*(torch.zeros(1, seq_len // 2, 3, 8) for _ in range(3)))  # type: ignore[operator]
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@pytest.mark.parametrize(
    ("method", "seq_len", "kind", "message"),
    [
        (
            "ring",
            30,
            "ours",
            r"InfeasibleLayout: train.seq_len = 30: .* multiple of 4 .* set train.seq_len to 28 or 32",
        ),
        ("ulysses", 31, "ours", r"InfeasibleLayout: train.seq_len = 31: .* multiple of 2 .* to 30 or 32"),
        (
            "ulysses",
            32,
            "ours",
            r"InfeasibleLayout: layout.cp = 2: .* 3 query heads .* set layout.cp_method to \"all-gather\" or \"ring\"",
        ),
        (
            "ring",
            32,
            "no attention",
            r"UnsupportedError: .* Silent .*CausalAttention .*, or set layout.cp",
        ),
        ("ring", 32, "no positions", r"UnsupportedError: layout.cp = 2: .* give it takes_positions = True"),
    ],
)
def test_an_unsupported_sequence_or_model_is_an_error(method: str, seq_len: int, kind: str, message: str) -> None:
    for given in run_ranks(_refusal, 2, {"cp": 2, "cp_method": method}, seq_len, kind):
        assert re.match(message, given), given


def _stage_without_blocks() -> list[str]:
    model = Model(None)
    model.blocks = nn.ModuleList([nn.Identity()])
    model.blocks._modules["0"] = None
    del model.core
    apply_context_parallel(model, build_meshes(Layout(cp=2), "cpu"), SEQ_LEN)
    return [name for name, _ in model.named_modules()]


def test_a_stage_without_blocks_has_no_attention_to_replace() -> None:
    assert run_ranks(_stage_without_blocks, 2) == [["", "blocks"]] * 2
