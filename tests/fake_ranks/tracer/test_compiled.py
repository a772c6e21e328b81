"""Compiled blocks are traced as the kernels that Inductor would make of them, where it cannot make any."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from meshwright.spec.trace.trace import NONE, Trace
from meshwright.tracer.programs.trace_ranks import DeviceType, trace
from repository import ROOT
from trained_step import BUILD, arguments_of

JOB = str(ROOT / "examples" / "tiny.toml")
MIXTURE = str(ROOT / "examples" / "tiny-moe.toml")
BLOCK = "blocks.1"
KEEPS_COLLECTIVES = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
"""torch 2.11's compiler does no collective again, though its block is recomputed, and no product that only one of them
sends: its backward of a block has 19 products and 4 collectives on gloo too, where 2.13's has 20 and 7.
"""


def traced(*overrides: str) -> Trace:
    layout = ("model.options.num_layers=2", "layout.dp_shard=4", "layout.tp=2", "precision.compute=bfloat16")
    return trace(BUILD, 3, 8, arguments_of(JOB, *layout, *overrides))


def ops(found: Trace, *, left_out: list[int] | None = None) -> Counter[str]:
    """Return how often each operator stands in a block's own code, but for rows that are left out."""
    rows = zip(found.records.signature, found.records.scope, strict=True)
    return Counter(
        found.signatures[position].op
        for row, (position, scope) in enumerate(rows)
        if position != NONE and found.scopes[scope].startswith(BLOCK) and row not in (left_out or ())
    )


def again(found: Trace) -> list[int]:
    """Return the rows of a forward that is done again."""
    rows = zip(found.records.phase, found.records.signature, strict=True)
    return [row for row, (phase, at) in enumerate(rows) if found.phases[phase] == "recompute" and at != NONE]


def kept(found: Trace) -> list[int]:
    """Return the rows of those that torch's compiler does not do again."""
    columns = found.records
    return [
        row
        for row in again(found)
        if KEEPS_COLLECTIVES
        and (
            "_c10d_functional." in found.signatures[columns.signature[row]].op
            or found.scopes[columns.scope[row]].endswith("attention.output")
        )
    ]


def moved_bytes(found: Trace) -> int:
    """Return what operators that multiply nothing read and write."""
    signatures = [found.signatures[position] for position in found.records.signature if position != NONE]
    return sum(one.read_bytes + one.written_bytes for one in signatures if one.flops == 0)


@pytest.fixture(scope="module")
def eager() -> Trace:
    return traced("layout.activation_checkpoint=full")


@pytest.fixture(scope="module")
def compiled() -> Trace:
    return traced("layout.activation_checkpoint=full", "layout.compile=true")


@pytest.mark.long
def test_what_is_fused_is_one_record(compiled: Trace) -> None:
    found = ops(compiled)
    assert any(name.startswith("inductor.fused(") and "rsqrt" in name for name in found)
    assert not any(name.startswith(("aten.mul.", "aten.silu.", "aten._fused_rms_norm.")) for name in found)


def test_the_same_is_multiplied_attended_and_sent(eager: Trace, compiled: Trace) -> None:
    with_compiler, without = ops(compiled), ops(eager, left_out=kept(eager))
    for part in ("aten.mm.", "attention", "_c10d_functional."):
        counts = [sum(n for name, n in found.items() if part in name) for found in (with_compiler, without)]
        assert counts[0] == counts[1] > 0, part


def test_what_is_computed_again_is_told(eager: Trace, compiled: Trace) -> None:
    def flops(found: Trace, rows: list[int]) -> int:
        return sum(found.signatures[found.records.signature[row]].flops for row in rows)

    assert flops(compiled, again(compiled)) == flops(eager, again(eager)) - flops(eager, kept(eager)) > 0


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_a_backward_rounds_is_not_recomputed(recipe: str) -> None:
    pytest.importorskip("torchao", reason="needs meshwright[torchao]")
    keys = (f"precision.float8={recipe}", "layout.compile=true", "layout.dp_shard=8", "layout.tp=1")
    found = traced(*keys)
    assert again(found) == []
    casts = [one.op for one in found.signatures if "inductor.fused(permute" in one.op]
    assert casts


def test_fusing_saves_traffic_and_memory(eager: Trace, compiled: Trace) -> None:
    assert moved_bytes(compiled) < 0.8 * moved_bytes(eager)
    # Recomputation is done for a whole block at once, as without a compiler; it keeps results of collectives
    # of one microbatch out of two.
    kept_bytes = sum(eager.signatures[eager.records.signature[row]].written_bytes for row in kept(eager)) / 2
    assert compiled.live_bytes().max() < 1.02 * eager.live_bytes().max() + kept_bytes
    # Parameters and the optimizer's state are the same.
    assert compiled.live_bytes()[0] == eager.live_bytes()[0]


@pytest.mark.long
@pytest.mark.parametrize("policy", ["none", "full"])
def test_compiled_mixtures_multiply_as_eager_ones_do(policy: str) -> None:
    keys = ("dp_shard=2", f"activation_checkpoint={policy}")
    job = ("model.options.num_layers=1", "precision.compute=bfloat16", *(f"layout.{key}" for key in keys))
    counts = []
    for how in ("false", "true"):
        found = trace(BUILD, 0, 2, arguments_of(MIXTURE, *job, f"layout.compile={how}"))
        phases = [found.phases[phase] for phase in found.records.phase]
        rows = zip(phases, found.records.signature, strict=True)
        names = [(phase, found.signatures[position].op) for phase, position in rows if position != NONE]
        counts.append(Counter(one for one in names if "mm." in one[1] or "attention" in one[1]))
    assert counts[0] == counts[1]


@pytest.mark.long
def test_recomputed_blocks_of_several_stages_are_compiled() -> None:
    keys = ("pp=2", "dp_shard=1", "schedule=Interleaved1F1B", "compile=true", "activation_checkpoint=full")
    layout = (*(f"layout.{key}" for key in keys), "model.options.num_layers=4", "precision.compute=bfloat16")
    found = trace(BUILD, 0, 2, arguments_of(JOB, *layout))
    assert {"blocks.0", "blocks.2"} <= set(found.scopes)
    assert again(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("inductor", "simgpu"),
        pytest.param("aot_eager", "cpu", marks=pytest.mark.long),
        pytest.param("inductor", "cpu", marks=pytest.mark.long),
        pytest.param("aot_eager", "simgpu", marks=pytest.mark.long),
    ],
)
def test_a_recomputed_block_is_traced_with_either_backend(backend: str, device: DeviceType) -> None:
    keys = ["layout.compile=true", f"layout.compile_backend={backend}", "layout.activation_checkpoint=full"]
    arguments = arguments_of(JOB, "layout.dp_shard=2", "train.global_batch_size=4", "precision.compute=bfloat16", *keys)
    found = trace(BUILD, 0, 2, arguments, device)
    assert any("attention" in signature.op for signature in found.signatures)


@pytest.mark.long
def test_what_reads_a_part_of_what_a_graph_gathers_does_not_move_all_of_it() -> None:
    # A model's graph gathers the weights of a block into one buffer, a norm's among them.
    keys = ("layout.tp=1", "layout.dp_shard=8", "layout.activation_checkpoint=none")
    most = [
        max(one.read_bytes + one.written_bytes for one in found.signatures if "rsqrt" in one.op)
        for found in (traced(*keys, f"layout.compile={how}") for how in ("model", "true"))
    ]
    # A norm is fused with more sums there.
    assert most[0] < 2 * most[1]
