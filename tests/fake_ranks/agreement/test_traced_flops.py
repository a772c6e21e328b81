"""What a traced step computes is what the planner's formulas say of it."""

from __future__ import annotations

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import work_of
from meshwright.cost.compute.recompute import recomputed_of
from meshwright.spec.layout.layout import Layout
from meshwright.spec.trace.trace import NONE, Trace
from meshwright.tracer.programs.trace_ranks import trace
from repository import ROOT
from trained_step import BUILD, arguments_of

JOB = str(ROOT / "examples" / "tiny.toml")
NUM_RANKS, NUM_MICROBATCHES, SEQ_LEN = 64, 2, 256
JOB_KEYS = ("precision.compute=bfloat16", "layout.microbatch_size=2")


def flops_of(found: Trace, *names: str) -> int:
    """Return the FLOPs of all operators whose names begin like one of `names`."""
    used = found.records.signature[found.records.signature != NONE]
    return sum(found.signatures[at].flops for at in used if found.signatures[at].op.startswith(names))


LONG = [pytest.param(*one, marks=pytest.mark.long) for one in ((1, "none"), (1, "full"), (2, "none"), (2, "selective"))]


@pytest.mark.long
@pytest.mark.parametrize(("tp", "policy"), [(2, "full"), *LONG])
def test_flops_are_the_formulas(tp: int, policy: str) -> None:
    dp = NUM_RANKS // tp
    batch = dp * 2 * NUM_MICROBATCHES
    keys = (*JOB_KEYS, f"train.global_batch_size={batch}", f"layout.tp={tp}", f"layout.dp_shard={dp}")
    found = trace(BUILD, 0, NUM_RANKS, arguments_of(JOB, *keys, f"layout.activation_checkpoint={policy}"))
    layout = Layout(tp=tp, dp_shard=dp, microbatch_size=2, activation_checkpoint=policy)
    of = configs(training_setup("llama-1m", stack="meshwright", seq_len=SEQ_LEN, global_batch_size=batch), layout)
    work, again = work_of(of), recomputed_of(of)
    lines, blocks = work.matmuls, work.blocks
    forward = np.bincount(lines.block, 2 * lines.groups * lines.m * lines.n * lines.k, len(blocks.key)) * blocks.count
    is_block = blocks.kind == BLOCK
    shares = (blocks.last_matmul_share, blocks.second_matmuls_share, blocks.early_terms_share)
    recomputed = forward * again.of_matmuls(*shares) * is_block
    assert flops_of(found, "aten.mm", "aten.addmm") == NUM_MICROBATCHES * (3 * forward + recomputed).sum()
    attended = float((blocks.attention_flops * blocks.count).sum())
    # torch counts the whole square of pairs, the convention the half that the mask leaves; backward has five products
    # for the two of the forward pass.
    passes = 1 + 2.5 + float(again.attention[0])
    assert flops_of(found, "aten._scaled_dot_product_cudnn_attention") == 2 * NUM_MICROBATCHES * passes * attended
