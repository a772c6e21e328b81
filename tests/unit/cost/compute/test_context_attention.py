"""What attention computes besides its causal kernels, against the operators counted by hand; other stacks have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_configs import changed, configs, training_setup
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import work_of
from meshwright.cost.compute.context_attention import ContextAttention
from meshwright.cost.constants import fitted_constants
from meshwright.cost.memory.footprint import footprint
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection
from meshwright.spec.layout.layout import ContextMethod, Layout

SEQ_LEN, CP = 16_384, 4
RING = Layout(dp_shard=2, cp=CP, cp_method="ring")
GATHER = Layout(dp_shard=2, cp=CP, cp_method="all-gather")
POSITIONS = SEQ_LEN // CP
QUERIES, KEYS_AND_VALUES, HEADS = POSITIONS * 4096, POSITIONS * 2 * 1024, POSITIONS * 32
"""Elements of Llama 3 8B on one rank; scores' logsumexps are one for each head."""


def ours() -> TrainingSetup:
    return changed(training_setup("llama3-8b", seq_len=SEQ_LEN), plain_context_attention=True)


def of(layout: Layout, given: TrainingSetup | None = None) -> tuple[ContextAttention, np.ndarray]:
    """Return the attention of one layout, and which row its blocks are."""
    table = configs(given or ours(), layout)
    blocks = work_of(table).blocks
    return ContextAttention(table, blocks), np.flatnonzero(blocks.kind == BLOCK)


def test_a_ring_moves_what_its_operators_read_and_write() -> None:
    attention, block = of(RING)
    forward, backward = attention.moved_bytes(block)
    wide, narrow = 4, 2
    own_and_result = 2 * (narrow + wide) * QUERIES
    # mul_ reads and writes the sum; addcmul_ reads it and a 16-bit piece, and writes it.
    merge = (2 * wide + 2 * wide + narrow) * QUERIES + (12 + 2 * 12 + 2 * 8 + 2 * 4 + 8) * HEADS
    assert forward == pytest.approx(own_and_result + (CP - 1) * merge)
    sums = wide * (QUERIES + KEYS_AND_VALUES)
    # The own piece has all of its keys, and each other one half of another rank's.
    added = (2 * wide + narrow) * (CP * QUERIES + (1 + (CP - 1) / 2) * KEYS_AND_VALUES)
    cast = (wide + narrow) * (QUERIES + KEYS_AND_VALUES)
    assert backward == pytest.approx(sums + added + cast)


def test_pieces_of_a_ring_have_the_rate_of_a_shorter_context() -> None:
    attention, block = of(RING)
    constants = fitted_constants()
    ramp = constants["attention_ramp_tokens"]

    def share(context: float) -> float:
        return context / (context + ramp)

    expected = share(SEQ_LEN / 2) / share(POSITIONS / 2)
    assert expected > 1.05
    assert attention.slowdown(block, constants)[0] == pytest.approx(expected)


def test_gathered_keys_are_put_in_order() -> None:
    attention, block = of(GATHER)
    forward, backward = attention.moved_bytes(block)
    gathered = KEYS_AND_VALUES * CP * 2
    assert forward == pytest.approx(4 * gathered)
    assert backward > 9 * gathered


@pytest.mark.parametrize("method", ["ring", "all-gather", "ulysses"])
def test_only_plain_operators_cost_more(method: ContextMethod) -> None:
    layout = Layout(dp_shard=2, cp=CP, cp_method=method)
    plain, fused = (step_times(configs(changed(ours(), plain_context_attention=on), layout)) for on in (True, False))
    costs = plain.total_s[0] > 1.01 * fused.total_s[0]
    assert costs == (method != "ulysses")


def test_only_whole_recomputation_merges_and_sends_a_ring_again() -> None:
    none, selective, full = (RING.replace(activation_checkpoint=kind) for kind in ("none", "selective", "full"))
    plain = step_times(configs(changed(ours(), plain_context_attention=False), none, selective, full))
    merged = step_times(configs(ours(), none, selective, full))
    more = merged.recomputation_s - plain.recomputation_s
    assert more[:2].tolist() == [0.0, 0.0]
    assert more[2] > 0
    assert merged.cp_communication_s[1] == pytest.approx(merged.cp_communication_s[0])
    assert merged.cp_communication_s[2] > merged.cp_communication_s[0]


NUM_BLOCKS = 32
METHODS: tuple[ContextMethod, ...] = ("all-gather", "ring", "ulysses")


def masking(*, masks_documents: bool = True, **workload: object) -> TrainingSetup:
    sizes = {"seq_len": SEQ_LEN, "masks_documents": masks_documents} | workload
    return training_setup("llama3-8b", stack="meshwright", **sizes)


def test_a_job_tells_formulas_that_it_masks_documents() -> None:
    for masks in (True, False):
        assert Job(data=DataSection(mask_documents=masks)).workload.masks_documents == masks


@pytest.mark.parametrize("layout", [Layout(dp_shard=8), Layout(dp_shard=2, cp=CP, cp_method="ulysses")])
def test_whole_sequences_compute_all_scores(layout: Layout) -> None:
    constants = fitted_constants()
    mask, block = of(layout, masking())
    ramp = constants["attention_ramp_tokens"]
    # Twice the work, at the rate of twice the keys.
    expected = 2 * (SEQ_LEN / 2 / (SEQ_LEN / 2 + ramp)) / (SEQ_LEN / (SEQ_LEN + ramp))
    assert mask.slowdown(block, constants)[0] == pytest.approx(expected)
    causal, block = of(layout, masking(masks_documents=False))
    assert causal.slowdown(block, constants)[0] == 1
    assert causal.mask_bytes() == 0


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("masks_documents", [True, False])
def test_a_mask_computes_the_scores_that_it_hides(cp: int, masks_documents: bool) -> None:
    layout = Layout(dp_shard=1, cp=cp, cp_method="all-gather")
    mask, block = of(layout, masking(masks_documents=masks_documents))
    chunk = SEQ_LEN // (2 * cp)
    # Both chunks of a rank, each with all keys up to its end, over its share of the causal half.
    pairs = [chunk * chunk * (rank + 1) + chunk * chunk * (2 * cp - rank) for rank in range(cp)]
    assert len(set(pairs)) == 1
    assert mask.slowdown(block, fitted_constants())[0] == pytest.approx(pairs[0] / (SEQ_LEN**2 / 2 / cp))


@pytest.mark.parametrize(("precision", "size"), [("bfloat16", 2), ("float32", 4)])
def test_masks_are_read_and_written_operator_by_operator(precision: str, size: int) -> None:
    gathered = Layout(dp_shard=2, cp=CP, microbatch_size=2, cp_method="all-gather")
    chunks = (SEQ_LEN // CP // 2) ** 2 * (2 * CP + 1)
    causal, _ = of(gathered, masking(masks_documents=False, precision=precision))
    # ones, tril; where, which also reads: one mask for both sequences.
    assert causal.mask_bytes() == pytest.approx(chunks * (1 + 2 + 1 + size))
    documents, _ = of(gathered, masking(precision=precision))
    # ones, tril; equal; and, which reads both; where.
    each = 1 + 2 + 1 + size
    assert documents.mask_bytes() == pytest.approx(chunks * (1 + 2 + 1 + 2 * each))
    whole, _ = of(Layout(dp_shard=8, compile=True), masking(precision=precision))
    assert whole.mask_bytes() == pytest.approx(SEQ_LEN**2 * size)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_documents_cost_only_ours_more(method: ContextMethod | None) -> None:
    layout = Layout(dp_shard=8) if method is None else Layout(dp_shard=2, cp=CP, cp_method=method)
    for stack, costs in (("meshwright", True), ("torchtitan-2025", False), ("megatron-core-2026", False)):
        plain = training_setup("llama3-8b", stack=stack, seq_len=SEQ_LEN)
        masked = replace(plain, workload=plain.workload.replace(masks_documents=True))
        without, with_documents = (step_times(configs(one, layout)).total_s[0] for one in (plain, masked))
        # Gathered keys have a mask anyhow, and documents make another one for each sequence.
        least = 1.0 if method == "all-gather" else 1.01
        assert (with_documents > least * without) if costs else (with_documents == without), stack


def test_a_mask_is_kept_of_each_block_unless_its_ops_run_again() -> None:
    whole, compiled = Layout(dp_shard=8), Layout(dp_shard=8, compile=True)
    selective, ring = whole.replace(activation_checkpoint="selective"), Layout(dp_shard=2, cp=CP, cp_method="ring")
    ulysses, gathered = (Layout(dp_shard=2, cp=CP, cp_method=name) for name in ("ulysses", "all-gather"))
    layouts = (whole, compiled, ulysses, gathered.replace(microbatch_size=2), ring, selective)
    plain, masked = (footprint(configs(masking(masks_documents=on), *layouts)) for on in (False, True))
    more = (masked.activations_bytes - plain.activations_bytes).tolist()
    of_sequence = 2 * SEQ_LEN**2 * NUM_BLOCKS
    assert more[:3] == pytest.approx([of_sequence] * 3)
    # A second sequence has a mask of its own.
    assert more[3] == pytest.approx(of_sequence / CP / 2)
    assert more[4:] == [0.0, 0.0]


def test_selective_recomputation_makes_the_mask_again() -> None:
    selective = Layout(dp_shard=8, activation_checkpoint="selective")
    without, with_documents = (step_times(configs(masking(masks_documents=on), selective)) for on in (False, True))
    assert with_documents.recomputation_s[0] > without.recomputation_s[0]


def test_a_pipeline_computes_hidden_scores_on_every_stage() -> None:
    without, with_documents = (
        step_times(configs(masking(masks_documents=on), Layout(pp=4, dp_shard=2))).total_s[0] for on in (False, True)
    )
    assert with_documents > 1.2 * without


def test_foreign_stacks_keep_what_they_kept() -> None:
    plain = changed(training_setup("llama3-8b", seq_len=SEQ_LEN), name="theirs")
    masked = replace(plain, workload=plain.workload.replace(masks_documents=True))
    kept, kept_masked = (footprint(configs(one, Layout(dp_shard=8))).activations_bytes[0] for one in (plain, masked))
    assert kept == kept_masked
