"""Mixtures run operator by operator where experts have ranks of their own, though blocks are compiled."""

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.communication.fsdp_copies import reordered_experts
from meshwright.cost.memory.footprint import footprint
from meshwright.cost.training_setup import Configurations
from meshwright.cost.work import BLOCK, Work, work_of
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.op import GroupedMatmul

MODEL = "mixtral-8x7b"


def priced(kernels: str, layout: Layout, stack: str = "meshwright") -> Configurations:
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
    work = work_of(priced(kernels, layout))
    assert ((work.blocks.eager_forward_elements[blocks(work)] > 0) == is_eager).all()


def test_exchanged_rows_are_put_in_order_once_more_each_way() -> None:
    alone, exchanged = (work_of(priced("eager", Layout(dp_shard=8, ep=ep))).blocks for ep in (1, 8))
    model = training_setup(MODEL, "h100-ib400", "meshwright", seq_len=4096).model
    experts = next(op for group in model.groups for op in group.ops if isinstance(op, GroupedMatmul))
    rows = experts.experts_per_token * 4096 * experts.in_features
    for name in ("eager_forward_elements", "eager_backward_elements"):
        more = getattr(exchanged, name) - getattr(alone, name)
        assert more.max() == pytest.approx(4 * rows)


def test_other_stacks_price_their_mixtures_as_before() -> None:
    work = work_of(priced("compiled", Layout(dp_shard=8, ep=8), "generic"))
    assert not work.blocks.eager_forward_elements.any()
    assert not work.matmuls.is_float32.any()


def test_our_routers_multiply_in_float32() -> None:
    work = work_of(priced("compiled", Layout(dp_shard=8)))
    routers = work.matmuls.is_float32
    assert work.matmuls.n[routers].tolist() == [8.0]


def test_experts_keep_their_product_but_not_its_factor() -> None:
    eager, compiled = (footprint(priced(kernels, Layout(dp_shard=8))) for kernels in ("eager", "compiled"))
    tokens, blocks_of_model = 4096, 32
    # Dense parts of an eager block keep a little more: far less than a factor.
    factor = 2 * 14_336 * tokens * blocks_of_model * 2
    more = eager.activations_bytes - compiled.activations_bytes
    assert more[0] < factor / 2
    assert more[0] >= 0


def test_experts_that_ranks_do_not_divide_are_copied_into_order() -> None:
    # Two experts a rank over eight ranks are cut in another dim; over two ranks they are not.
    for ep, dp_shard, is_cut_across in ((4, 32, True), (4, 8, False), (8, 8, False)):
        of_cases = priced("compiled", Layout(dp_shard=dp_shard, ep=ep))
        work = work_of(of_cases)
        parallel = DataParallel(of_cases, work)
        copied = reordered_experts(parallel, blocks(work)[:1])
        assert (copied > 0).all() == is_cut_across
