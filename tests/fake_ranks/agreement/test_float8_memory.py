"""What a compiled block in float8 keeps for backward: by the formulas, and traced."""

from __future__ import annotations

import pytest

import meshwright as mw
from repository import ROOT

pytest.importorskip("torchao", reason="needs meshwright[torchao]")
KEYS = (
    "model.source=llama3-8b",
    "model.options.num_layers=2",
    "train.seq_len=8192",
    "train.global_batch_size=4",
    "precision.compute=bfloat16",
    "layout.dp_shard=1",
    "layout.compile=true",
    "layout.compile_loss=true",
)


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "at_once"), [("tensorwise", 1), ("tensorwise", 2), ("rowwise", 2)])
def test_a_compiled_block_keeps_what_formulas_say(recipe: str, at_once: int) -> None:
    overrides = (*KEYS, f"precision.float8={recipe}", f"layout.microbatch_size={at_once}")
    outcome = mw.simulate(str(ROOT / "examples" / "tiny.toml"), *overrides, cluster="h200-efa:1").run.outcome
    assert outcome is not None
    assert outcome.predicted is not None
    allocated = outcome.predicted.memory.allocated_bytes
    assert allocated == pytest.approx(outcome.memory[0].allocated_bytes, rel=0.02)
