"""What a traced step sends is what the planner's formulas price, to the byte: they are asked about links that take one
second a byte, and no more. What they leave out:

| what | formula | trace |
|---|---|---|
| loss and norm of a step | nothing | sums of one number over all ranks |
| loss, tp | nothing | greatest logit, and three sums, in float32: 16 bytes a token |
| loss, cp | nothing | one number a microbatch |
| router's losses, cp and tp | nothing | tokens of each expert: 4 bytes an expert, sequence and block |
| sizes, ep | nothing | tokens for each expert: 8 bytes an expert, microbatch and block, forward |
| norms of a pipeline's stage, tp | half of those outside of blocks | those of the stage |
| key heads that tp ranks share | nothing | keys' and values' weights, gathered each microbatch; their gradients |
| shards of FSDP2 | parameters as they are | dim 0 filled up to a multiple of the ranks |

Stacks differ, and the table of ours is not that of others (tests/unit/cost/communication/test_communication.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.training_setup import Configurations
from meshwright.spec.layout.layout import Layout
from meshwright.spec.trace.trace import NONE, RecordKind, Trace
from meshwright.tracer.programs.trace_ranks import trace
from repository import ROOT
from trained_step import BUILD, arguments_of
from wire_bytes import sent_by_formulas, sent_in_trace, sent_to_next_stage

EXAMPLES = ROOT / "examples"
JOBS = {"llama-1m": "tiny.toml", "moe-4m": "tiny-moe.toml"}
SEQ_LEN, NUM_MICROBATCHES, NUM_BLOCKS, NUM_EXPERTS = 256, 2, 4, 8


def both(model: str, **keys: Any) -> tuple[Configurations, Trace]:
    """Return the layout as a case, and the trace of its first rank."""
    layout = Layout(microbatch_size=2, **keys)
    batch = 2 * NUM_MICROBATCHES * layout.dp
    texts = [f"layout.{name}={value}" for name, value in (keys | {"microbatch_size": 2}).items()]
    job = (f"train.seq_len={SEQ_LEN}", f"train.global_batch_size={batch}", "precision.compute=bfloat16")
    found = trace(BUILD, 0, layout.num_ranks, arguments_of(str(EXAMPLES / JOBS[model]), *job, *texts))
    return configs(training_setup(model, stack="meshwright", seq_len=SEQ_LEN, global_batch_size=batch), layout), found


def left_out(cp: int, tp: int, etp: int, ep: int) -> Mapping[tuple[str, str], int]:
    """Return the bytes of the table, as one rank sends them."""
    tokens, of_blocks = 2 * SEQ_LEN // cp, NUM_MICROBATCHES * NUM_BLOCKS
    counts = 2 * of_blocks * NUM_EXPERTS * 4
    sent = {
        ("tp", "loss"): 2 * 16 * tokens * NUM_MICROBATCHES * (tp - 1) // tp,
        ("tp", "router"): 2 * counts * (tp - 1) // tp if etp == 1 else 0,
        ("cp", "router"): 2 * counts * (cp - 1) // cp,
        ("ep", "sizes"): of_blocks * NUM_EXPERTS * 8 * (ep - 1) // ep,
    }
    return {key: num_bytes for key, num_bytes in sent.items() if num_bytes}


MIXTURES = [
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 4, "etp": 1},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2, "cp_method": "ring", "reshard_after_forward": "never"},
]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(MIXTURES[0], id="hsdp-gather-ep", marks=pytest.mark.long),
        pytest.param(MIXTURES[1], id="kept-ring-etp"),
    ],
)
def test_a_mixtures_ranks_send_what_is_priced(keys: dict[str, Any]) -> None:
    of, found = both("moe-4m", **keys)
    priced, others = sent_in_trace(found)
    assert priced == sent_by_formulas(of)
    assert {axis for axis, _ in priced} == {"tp", "cp", "ep", "dp"}
    others.pop(("", "numbers"))
    assert others == left_out(**{name: keys[name] for name in ("cp", "tp", "etp", "ep")})


@pytest.mark.long
def test_a_stage_sends_what_is_priced() -> None:
    of, found = both("llama-1m", dp_shard=2, cp=2, tp=2, pp=2, cp_method="ulysses")
    priced, _ = sent_in_trace(found)
    del priced["tp", "optimizer"]
    assert priced == sent_by_formulas(of)
    is_sent = (found.records.kind == RecordKind.SEND) & (found.records.num_bytes > 0)
    of_axis = np.array([found.group_names[group] == "pp" for group in found.records.group[is_sent]])
    assert found.records.num_bytes[is_sent][of_axis].sum() == sent_to_next_stage(of)


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [
        {"dp_shard": 2, "cp": 4, "cp_method": "ulysses"},
        {"dp_shard": 4, "reshard_after_forward": "never"},
        {"dp_replicate": 2, "tp": 2},
        {"dp_shard": 2, "tp": 4},
    ],
    ids=str,
)
def test_a_dense_models_ranks_send_what_is_priced(keys: dict[str, Any]) -> None:
    of, found = both("llama-1m", **keys)
    priced, others = sent_in_trace(found)
    assert priced == sent_by_formulas(of)
    # Two key heads of 32 x 128 weights, in bfloat16; each of the four blocks has keys and values.
    shared = NUM_MICROBATCHES * NUM_BLOCKS * 2 * 32 * 128 * 2 // 2 if keys.get("tp") == 4 else 0
    assert others["tp_heads", "shared heads"] == 2 * shared


@pytest.mark.long
def test_shards_of_fsdp_are_filled_up() -> None:
    # 128 rows of each matrix over 512 ranks: each gather is of 512 rows.
    keys = ("train.seq_len=64", "train.global_batch_size=512", "layout.dp_shard=512", "layout.microbatch_size=1")
    priced, _ = sent_in_trace(trace(BUILD, 0, 512, arguments_of(str(EXAMPLES / "tiny.toml"), *keys)))
    layout = Layout(dp_shard=512)
    of = configs(training_setup("llama-1m", stack="meshwright", seq_len=64, global_batch_size=512), layout)
    assert 2 < priced["dp", ""] / sent_by_formulas(of)["dp", ""] < 4


@pytest.mark.long
@pytest.mark.parametrize("routing", ["zipf:1.2", "worst"])
def test_uneven_routing_costs_bytes_and_memory(routing: str) -> None:
    keys = ("layout.dp_shard=8", "layout.ep=4", "train.global_batch_size=16", "train.seq_len=64")
    even, uneven = (
        trace(BUILD, 0, 8, arguments_of(str(EXAMPLES / "tiny-moe.toml"), *keys), routing=name)
        for name in ("balanced", routing)
    )
    of_even, of_uneven = (sent_in_trace(one)[0]["ep", "forward"] for one in (even, uneven))
    assert of_uneven > of_even
    assert uneven.live_bytes().max() > even.live_bytes().max()
    if routing == "worst":
        # All four ranks send all of their tokens here.
        assert of_uneven > 2 * of_even


@pytest.mark.long
def test_groups_of_n_ranks_gather_what_forward_left_them() -> None:
    keys = ("train.seq_len=64", "train.global_batch_size=16", "layout.dp_shard=8", "layout.reshard_after_forward=2")
    found = trace(BUILD, 0, 8, arguments_of(str(EXAMPLES / "tiny.toml"), *keys))
    records = found.records
    groups = {
        (found.group_names[group], len(found.groups[group]), found.phases[phase])
        for group, phase, work in zip(records.group, records.phase, records.work, strict=True)
        if work != NONE and group != NONE
    }
    assert ("fsdp", 8, "forward") in groups
    assert ("fsdp", 2, "backward") in groups
