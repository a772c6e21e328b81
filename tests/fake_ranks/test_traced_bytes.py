"""What a traced step sends is what the planner's formulas say; where they differ, this says how.

| what | formula | trace |
|---|---|---|
| a block's tp, backward | gathers what was gathered in forward anew: 5 for 4 | keeps it: 4, as forward |
| the embedding's tp | nothing | scattered forward, gathered backward: 1 and 1 |
| a step's tp, optimizer | nothing | sums the gradients of norms, which all ranks of tp hold whole |
| shards of FSDP2 | parameters as they are | dim 0 filled up to a multiple of the ranks |
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cost_cases import cases, setting
from meshwright.cost.work import work_of
from meshwright.spec.layout import Layout
from meshwright.spec.trace import NONE, RecordKind, Trace
from meshwright.tracer.trace import trace

BUILD = "meshwright.trainer.build_step:build_step"
EXAMPLES = Path(__file__).parents[2] / "examples"
SEQ_LEN, BATCH, NUM_MICROBATCHES, BLOCKS_OF_STAGE = 256, 32, 4, 2
DP, TP, PP = 4, 2, 2
KEYS = (f"train.seq_len={SEQ_LEN}", f"train.global_batch_size={BATCH}", "precision.compute=bfloat16")
LAYOUT = (f"layout.dp_shard={DP}", f"layout.tp={TP}", f"layout.pp={PP}", "layout.microbatch_size=2")
BFLOAT16, FLOAT32 = 2, 4


def sent(found: Trace) -> Counter[tuple[str, str, str]]:
    """Return the bytes of all collectives and messages by axis, phase and kind of scope: block, mark or file."""
    records, total = found.records, Counter[tuple[str, str, str]]()
    for row, work in enumerate(records.work):
        if work == NONE or records.kind[row] == RecordKind.WAIT:
            continue
        scope, axis = found.scopes[records.scope[row]], found.group_names[records.group[row]]
        where = (
            "block" if "blocks." in scope else scope.partition(":")[0] if ".py:" in scope else scope.partition(" ")[0]
        )
        total[axis, found.phases[records.phase[row]], where] += int(records.num_bytes[row])
    return total


@pytest.fixture(scope="module")
def found() -> Counter[tuple[str, str, str]]:
    return sent(trace(BUILD, 0, DP * TP * PP, [str(EXAMPLES / "tiny.toml"), *KEYS, *LAYOUT]))


def test_wire_bytes_of_a_stage_are_the_formulas(found: Counter[tuple[str, str, str]]) -> None:
    layout = Layout(dp_shard=DP, tp=TP, pp=PP, microbatch_size=2)
    owners = work_of(
        cases(setting("llama-1m", stack="meshwright", seq_len=SEQ_LEN, global_batch_size=BATCH), layout)
    ).owners
    embedding, block, _ = range(3)
    residual = int(owners.tokens[block] * owners.width[block]) * BFLOAT16
    of_tp = NUM_MICROBATCHES * BLOCKS_OF_STAGE * int(owners.num_tp_collectives[block]) * residual
    assert found["tp", "forward", "block"] == found["tp", "backward", "block"] == of_tp
    # What the formula leaves out, and below what it does not price.
    assert found["tp", "forward", "embedding"] == found["tp", "backward", "embedding"] == NUM_MICROBATCHES * residual
    assert (
        found["pp", "forward", "pipeline.py"]
        == found["pp", "backward", "pipeline.py"]
        == NUM_MICROBATCHES * residual // TP
    )
    of_block, of_ends = (int(owners.dense_parameters[at]) for at in (block, embedding))
    # A pipeline keeps what it gathered until its step ends.
    blocks = BLOCKS_OF_STAGE * of_block
    assert found["fsdp", "forward", "block"] == blocks * BFLOAT16
    assert found["fsdp", "backward", "block"] == blocks * FLOAT32
    assert found["fsdp", "forward", "FSDP::all_gather"] == of_ends * BFLOAT16
    assert found["fsdp", "backward", "FSDP::post_backward_reduce"] == of_ends * FLOAT32
    named = {key for key in found if key[0] in ("tp", "pp", "fsdp") and key[1] != "optimizer"}
    assert len(named) == 10, sorted(named)


@pytest.mark.long
def test_shards_of_fsdp_are_filled_up() -> None:
    # 128 rows of each matrix over 512 ranks: each gather is of 512 rows.
    keys = ("train.seq_len=64", "train.global_batch_size=512", "layout.dp_shard=512", "layout.microbatch_size=1")
    total = sent(trace(BUILD, 0, 512, [str(EXAMPLES / "tiny.toml"), *keys]))
    layout = Layout(dp_shard=512)
    owners = work_of(cases(setting("llama-1m", stack="meshwright", seq_len=64, global_batch_size=512), layout)).owners
    parameters = int(owners.dense_parameters[1] * owners.count[1])
    gathered = total["fsdp", "forward", "block"] / FLOAT32
    assert 2 < gathered / parameters < 4


@pytest.mark.parametrize("routing", [pytest.param("zipf:1.2", marks=pytest.mark.long), "worst"])
def test_uneven_routing_costs_bytes_and_memory(routing: str) -> None:
    keys = ("layout.dp_shard=8", "layout.ep=4", "train.global_batch_size=16", "train.seq_len=64")
    even, uneven = (
        trace(BUILD, 0, 8, [str(EXAMPLES / "tiny-moe.toml"), *keys], routing=name) for name in ("balanced", routing)
    )
    assert sent(uneven)["ep", "forward", "block"] > sent(even)["ep", "forward", "block"]
    assert uneven.live_bytes().max() > even.live_bytes().max()
    if routing == "worst":
        # All four ranks send all of their tokens here.
        assert sent(uneven)["ep", "forward", "block"] > 2 * sent(even)["ep", "forward", "block"]
