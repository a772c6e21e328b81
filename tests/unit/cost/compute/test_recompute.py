"""What activation checkpointing computes again: the FLOPs that torch counts in the real module, and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cost_configs import changed, configs, training_setup
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import work_of
from meshwright.cost.compute.recompute import Recomputed, recomputed_of
from meshwright.models.build import build_architecture
from meshwright.models.initial import initialize
from meshwright.parallelism.activation_checkpoint import checkpoint_blocks
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.presets import PRESETS
from torch_flops import counted_flops

BATCH_SIZE, SEQ_LEN = 2, 32


def flops_of_pass(model: str, layout: Layout) -> int:
    """Return the FLOPs of the matmuls, without attention's, of a pass forward and backward."""
    module = build_architecture(PRESETS[model])
    initialize(module, seed=0)
    checkpoint_blocks(module.blocks, layout)
    return counted_flops(module, torch.randint(PRESETS[model].vocab_size, (BATCH_SIZE, SEQ_LEN)))[0]


def priced_flops(model: str, again: Recomputed) -> float:
    """Return the FLOPs of all blocks' matmuls that are recomputed."""
    work = work_of(configs(training_setup(model, seq_len=SEQ_LEN), Layout(microbatch_size=BATCH_SIZE)))
    lines, blocks = work.matmuls, work.blocks
    of_block = np.bincount(lines.block, 2 * lines.groups * lines.m * lines.n * lines.k, len(blocks.key)) * blocks.count
    share = again.of_matmuls(blocks.last_matmul_share, blocks.second_matmuls_share, blocks.early_terms_share)
    return float((of_block * share)[blocks.kind == BLOCK].sum())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-1m", "moe-4m", "mla-moe-4m"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_flops_are_those_that_torch_counts(model: str, policy: Any) -> None:
    layout = Layout(microbatch_size=BATCH_SIZE, activation_checkpoint=policy)
    none = layout.replace(activation_checkpoint="none")
    again = recomputed_of(configs(training_setup(model, stack="meshwright", seq_len=SEQ_LEN), layout))
    assert flops_of_pass(model, layout) - flops_of_pass(model, none) == priced_flops(model, again)


def test_a_compiled_selective_backward_repeats_a_third_of_memory_bound_work() -> None:
    selective = Layout(activation_checkpoint="selective")
    ours = training_setup("llama3-8b", stack="meshwright")
    eager, compiled, full = (
        recomputed_of(configs(ours, selective.replace(**change)))
        for change in ({}, {"compile": True}, {"compile": True, "activation_checkpoint": "full"})
    )
    assert (eager.whole, eager.own_kernels, eager.fused) == (0, 1, 0)
    assert 0.25 < compiled.own_kernels + compiled.fused < 0.4
    assert (full.whole, full.own_kernels, full.fused) == (1, 0, 0)


def test_a_stack_that_does_not_stop_early_does_all_of_a_block_again() -> None:
    layout = Layout(activation_checkpoint="full", tp=4)
    of = training_setup("llama3-8b")
    early, whole = (recomputed_of(configs(changed(of, recompute_stops_early=stops), layout)) for stops in (True, False))
    share = np.array([0.25])
    assert whole.of_matmuls(share, share, share) == 1
    assert early.of_matmuls(share, share, share) == 0.75
    assert whole.of_collectives(np.array([4.0]), share) == 1
    assert early.of_collectives(np.array([4.0]), share) == 0.75
    # The last matmul of experts is needed, and so is what follows it.
    assert early.of_collectives(np.array([4.0]), 0 * share) == 1


@pytest.mark.parametrize(
    ("cluster", "saves", "share"), [("h100-ib400", False, 0), ("b200-ib400", False, 1), ("b200-ib400", True, 0)]
)
def test_attention_is_recomputed_where_its_kernel_is_not_listed(cluster: str, saves: bool, share: float) -> None:
    of = changed(training_setup("llama3-8b", cluster=cluster), saves_cudnn_attention=saves)
    assert recomputed_of(configs(of, Layout(activation_checkpoint="selective"))).attention == share


def test_half_of_the_matmul_outputs_are_the_second_fourth_and_sixth() -> None:
    of = changed(training_setup("llama3-8b"), selective="half-of-matmul-outputs")
    again = recomputed_of(configs(of, Layout(activation_checkpoint="selective")))
    blocks = work_of(configs(of, Layout())).blocks
    shares = (blocks.last_matmul_share, blocks.second_matmuls_share, blocks.early_terms_share)
    (share,) = again.of_matmuls(*shares)[blocks.kind == BLOCK]
    # Query, key, value, output, gate, up and down of Llama 3 8B: key, output and up.
    sizes = {"q": 4096, "k": 1024, "v": 1024, "o": 4096, "gate": 14336, "up": 14336, "down": 14336}
    assert share == pytest.approx(sum(sizes[name] for name in ("k", "o", "up")) / sum(sizes.values()))
