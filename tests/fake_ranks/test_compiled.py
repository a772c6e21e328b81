"""Compiled blocks are traced as the kernels that Inductor would make of them, where it cannot make any."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from meshwright.spec.trace import NONE, Trace
from meshwright.tracer.trace import trace

BUILD = "meshwright.trainer.build_step:build_step"
JOB = str(Path(__file__).parents[2] / "examples" / "tiny.toml")
BLOCK = "blocks.1"


def traced(*overrides: str) -> Trace:
    layout = ("layout.dp_shard=4", "layout.tp=2", "precision.compute=bfloat16")
    return trace(BUILD, 3, 8, [JOB, *layout, *overrides])


def ops(found: Trace) -> Counter[str]:
    """Return how often each operator stands in a block's own code."""
    return Counter(
        found.signatures[position].op
        for position, scope in zip(found.records.signature, found.records.scope, strict=True)
        if position != NONE and found.scopes[scope].startswith(BLOCK)
    )


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


def test_what_is_fused_is_one_record(compiled: Trace) -> None:
    found = ops(compiled)
    assert any(name.startswith("inductor.fused(") and "rsqrt" in name for name in found)
    assert not any(name.startswith(("aten.mul.", "aten.silu.", "aten._fused_rms_norm.")) for name in found)


def test_the_same_is_multiplied_attended_and_sent(eager: Trace, compiled: Trace) -> None:
    with_compiler, without = ops(compiled), ops(eager)
    for part in ("aten.mm.", "attention", "_c10d_functional."):
        counts = [sum(n for name, n in found.items() if part in name) for found in (with_compiler, without)]
        assert counts[0] == counts[1] > 0, part


def test_what_is_computed_again_is_told(eager: Trace, compiled: Trace) -> None:
    def again(found: Trace) -> int:
        """Return the FLOPs of a forward that is done again."""
        phases = [found.phases[phase] for phase in found.records.phase]
        pairs = zip(phases, found.records.signature, strict=True)
        return sum(
            found.signatures[position].flops for phase, position in pairs if phase == "recompute" and position >= 0
        )

    assert again(compiled) == again(eager) > 0


def test_fusing_saves_traffic_and_memory(eager: Trace, compiled: Trace) -> None:
    assert moved_bytes(compiled) < 0.8 * moved_bytes(eager)
    # What is computed again is done for a whole block at once, as without a compiler.
    assert compiled.live_bytes().max() < 1.02 * eager.live_bytes().max()
    # Parameters and the optimizer's state are the same.
    assert compiled.live_bytes()[0] == eager.live_bytes()[0]
