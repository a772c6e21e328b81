"""What our own kernels read and write is what traced steps did: counted on torch 2.13, 2026-11-23."""

from __future__ import annotations

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.blocks.block_table import BLOCK, FIRST, LAST
from meshwright.cost.blocks.work import Work, work_of
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.fsdp_copies import reordered_experts
from meshwright.cost.compute.block_compute import SequenceCopies, sequence_copies
from meshwright.cost.compute.own_kernels import end_kernels, own_kernels, position_kernels
from meshwright.cost.compute.recompute import recomputed_of
from meshwright.cost.memory.footprint import footprint
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.op import GroupedMatmul

NARROW = LlamaArchitecture(
    vocab_size=262_144, dim=1536, num_layers=8, num_heads=12, num_kv_heads=4, head_dim=128, ffn_dim=4096
)
TRACED_MB = {
    ("compiled", 1): (255.9, 449.7),
    ("eager", 1): (738.2, 1010.9),
    ("compiled", 4): (170.9, 301.2),
    ("eager", 4): (291.5, 495.0),
}
"""Of one block and microbatch of 4096 tokens, forward and backward, with what a compiled one computes again."""


def priced(kernels: str, layout: Layout, stack: str = "meshwright") -> Configurations:
    of = training_setup("llama3-8b", "h100-ib400", stack, seq_len=4096)
    of = TrainingSetup(model_spec(NARROW), of.workload, of.cluster, of.stack.replace(kernels=kernels))
    return configs(of, layout.replace(compile=kernels == "compiled"))


def block_of(work: Work) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.flatnonzero(work.blocks.kind == BLOCK)[:1]


def copies_of(config: Configurations, work: Work) -> SequenceCopies:
    return sequence_copies(work.blocks, block_of(work), config.layouts, recomputed_of(config), np.array([True]))


@pytest.mark.parametrize(("kernels", "tp"), TRACED_MB)
def test_a_block_moves_what_was_traced(kernels: str, tp: int) -> None:
    case = priced(kernels, Layout(tp=tp))
    work = work_of(case)
    copied, block = copies_of(case, work), block_of(work)
    forward = work.blocks.own_forward_elements[block] + copied.forward
    backward = work.blocks.own_backward_elements[block] + copied.backward + copied.again
    # The compiler also normalises an input again under tp, and keeps more where it need not gather.
    assert 2e-6 * float(forward[0]) == pytest.approx(TRACED_MB[kernels, tp][0], rel=0.08)
    assert 2e-6 * float(backward[0]) == pytest.approx(TRACED_MB[kernels, tp][1], rel=0.08)


def test_async_tp_copies_nothing_around_blocks() -> None:
    case = priced("compiled", Layout(tp=4, async_tp=True))
    assert not any(part.any() for part in copies_of(case, work_of(case)))


def test_recomputation_gathers_instead_of_gathering_again() -> None:
    for kernels in ("compiled", "eager"):
        kept, again = (
            copies_of(case, work_of(case))
            for case in (priced(kernels, Layout(tp=4, activation_checkpoint=save)) for save in ("none", "selective"))
        )
        assert again.again + again.backward == pytest.approx(kept.again + kept.backward)


def test_the_gradient_of_an_embedding_is_written_whole() -> None:
    few, shared = (work_of(priced("eager", Layout(tp=tp))).blocks for tp in (1, 4))
    tokens, table = 4096 * NARROW.dim, NARROW.vocab_size * NARROW.dim
    assert few.own_backward_elements[0] == tokens + table
    assert shared.own_backward_elements[0] == 3 * tokens + table / 4


def test_other_software_is_priced_by_its_operators() -> None:
    work = work_of(priced("compiled", Layout(tp=4), "generic"))
    assert not work.blocks.own_forward_elements.any()
    assert work.blocks.memory_elements[block_of(work)] > 0


@pytest.mark.parametrize(
    ("kernels", "tp", "expected"),
    [("compiled", 1, (6, 8)), ("eager", 1, (20, 24)), ("compiled", 4, (10, 12)), ("eager", 4, (24, 30))],
)
def test_a_block_launches_what_was_traced(kernels: str, tp: int, expected: tuple[int, int]) -> None:
    case = priced(kernels, Layout(tp=tp))
    work = work_of(case)
    assert tuple(float(one[block_of(work)][0]) for one in own_kernels(work, case.setups)) == expected
    assert not any(one[block_of(work)].any() for one in end_kernels(work, case.setups))


@pytest.mark.parametrize(
    ("kernels", "ep", "expected"), [("compiled", 1, (27, 13)), ("eager", 1, (70, 49)), ("compiled", 4, (86, 53))]
)
def test_a_mixture_launches_what_was_traced(kernels: str, ep: int, expected: tuple[int, int]) -> None:
    of = training_setup("mixtral-8x7b", stack="meshwright")
    of = TrainingSetup(of.model, of.workload, of.cluster, of.stack.replace(kernels=kernels))
    work = work_of(configs(of, Layout(dp_shard=4, ep=ep)))
    assert tuple(float(one[block_of(work)][0]) for one in own_kernels(work, (of,))) == expected


@pytest.mark.parametrize(("tp", "embedding", "head"), [(1, (1, 1), (7, 6)), (4, (8, 3), (29, 12))])
def test_the_ends_launch_what_was_traced(tp: int, embedding: tuple[int, int], head: tuple[int, int]) -> None:
    """Under tp with a copy for the one collective of each."""
    case = priced("eager", Layout(tp=tp))
    work = work_of(case)
    for kind, expected in ((FIRST, embedding), (LAST, head)):
        assert tuple(float(one[work.blocks.kind == kind][0]) for one in end_kernels(work, case.setups)) == expected


def test_each_stage_makes_its_tables_of_rotary_embedding_once() -> None:
    case = priced("eager", Layout(pp=4, schedule="Interleaved1F1B", virtual_stages=2))
    blocks, num_blocks = work_of(case).blocks, np.array([float(NARROW.num_layers)])
    for kind, per_stage in ((BLOCK, 13), (FIRST, 0), (LAST, 0)):
        one = position_kernels(blocks, np.flatnonzero(blocks.kind == kind), case.layouts, num_blocks)
        assert float(one[0] * NARROW.num_layers) == per_stage * 8


MODEL = "mixtral-8x7b"


def mixture(kernels: str, layout: Layout, stack: str = "meshwright") -> Configurations:
    of = training_setup(MODEL, "h100-ib400", stack, seq_len=4096)
    return configs(type(of)(of.model, of.workload, of.cluster, of.stack.replace(kernels=kernels)), layout)


def blocks(work: Work) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.flatnonzero(work.blocks.kind == BLOCK)


@pytest.mark.parametrize(
    ("kernels", "layout", "is_eager"),
    [
        ("eager", Layout(dp_shard=8), True),
        ("compiled", Layout(dp_shard=8), False),
        ("compiled", Layout(dp_shard=8, ep=8), True),
        ("compiled", Layout(dp_shard=4, tp=2), True),
    ],
)
def test_a_mixture_is_compiled_with_its_block_only(kernels: str, layout: Layout, is_eager: bool) -> None:
    work = work_of(mixture(kernels, layout))
    assert ((work.blocks.eager_forward_elements[blocks(work)] > 0) == is_eager).all()


def test_exchanged_rows_are_put_in_order_once_more_each_way() -> None:
    alone, exchanged = (work_of(mixture("eager", Layout(dp_shard=8, ep=ep))).blocks for ep in (1, 8))
    model = training_setup(MODEL, "h100-ib400", "meshwright", seq_len=4096).model
    experts = next(op for group in model.groups for op in group.ops if isinstance(op, GroupedMatmul))
    rows = experts.experts_per_token * 4096 * experts.in_features
    for name in ("eager_forward_elements", "eager_backward_elements"):
        more = getattr(exchanged, name) - getattr(alone, name)
        assert more.max() == pytest.approx(4 * rows)


def test_other_stacks_price_their_mixtures_as_before() -> None:
    work = work_of(mixture("compiled", Layout(dp_shard=8, ep=8), "generic"))
    assert not work.blocks.eager_forward_elements.any()
    assert not work.matmuls.is_float32.any()


def test_our_routers_multiply_in_float32() -> None:
    work = work_of(mixture("compiled", Layout(dp_shard=8)))
    routers = work.matmuls.is_float32
    assert work.matmuls.n[routers].tolist() == [8.0]


def test_experts_keep_their_product_but_not_its_factor() -> None:
    eager, compiled = (footprint(mixture(kernels, Layout(dp_shard=8))) for kernels in ("eager", "compiled"))
    tokens, blocks_of_model = 4096, 32
    # Dense parts of an eager block keep a little more: far less than a factor.
    factor = 2 * 14_336 * tokens * blocks_of_model * 2
    more = eager.activations_bytes - compiled.activations_bytes
    assert more[0] < factor / 2
    assert more[0] >= 0


def test_experts_that_ranks_do_not_divide_are_copied_into_order() -> None:
    # Two experts a rank over eight ranks are cut in another dim; over two ranks they are not.
    for ep, dp_shard, is_cut_across in ((4, 32, True), (4, 8, False), (8, 8, False)):
        of_cases = mixture("compiled", Layout(dp_shard=dp_shard, ep=ep))
        work = work_of(of_cases)
        parallel = DataParallel(of_cases, work)
        copied = reordered_experts(parallel, blocks(work)[:1])
        assert (copied > 0).all() == is_cut_across
