"""Which matmuls of our own trainer are priced in float8, and what that saves and costs."""

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import Work, work_of
from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.memory.footprint import footprint
from meshwright.cost.training_setup import Configurations
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.wide_matmuls import with_wide_matmuls

LLAMA = resolve_architecture(ModelSection(source="llama3-8b"))
assert isinstance(LLAMA, LlamaArchitecture)


def ours(precision: str, *layouts: Layout, model: str = "llama3-8b") -> Configurations:
    return configs(training_setup(model, stack="meshwright", precision=precision), *layouts)


def blocks(work: Work) -> np.ndarray:
    return work.blocks.kind[work.matmuls.block] == BLOCK


def test_linear_layers_of_blocks_are_low_and_the_head_is_not() -> None:
    work = work_of(ours("float8-tensorwise", Layout()))
    assert work.matmuls.is_low[blocks(work)].all()
    assert not work.matmuls.is_low[~blocks(work)].any()
    assert work.blocks.num_low_matmuls.max() == 7


def test_experts_and_routers_of_ours_are_not_low() -> None:
    work = work_of(ours("float8-tensorwise", Layout(), model="mixtral-8x7b"))
    assert not work.matmuls.is_low[work.matmuls.is_expert].any()
    assert work.blocks.num_low_matmuls.max() == 4


def test_what_tp_leaves_must_divide_by_16() -> None:
    odd = model_spec(LLAMA.replace(ffn_dim=16 * 24))
    of = training_setup(stack="meshwright", precision="float8-tensorwise")
    of = type(of)(odd, of.workload, of.cluster, of.stack)
    one, shared = (work_of(configs(of, Layout(tp=tp))) for tp in (1, 16))
    assert (one.blocks.num_low_matmuls.max(), shared.blocks.num_low_matmuls.max()) == (7, 4)


def test_skipped_layers_stay_wide_in_the_blocks_that_are_named() -> None:
    spec = with_wide_matmuls(model_spec(LLAMA), ["blocks.0.*", "blocks.*.attention.key"])
    assert [group.count for group in spec.groups] == [1, 1, 31, 1]
    assert spec.num_parameters == model_spec(LLAMA).num_parameters
    wide = [[op.name for op in group.ops if getattr(op, "is_wide", False)] for group in spec.groups]
    assert (len(wide[1]), wide[2]) == (7, ["attention.key"])


@pytest.mark.parametrize(("precision", "low"), [("float8-tensorwise", True), ("float8-rowwise", False)])
def test_tensorwise_weights_are_gathered_in_one_byte(precision: str, low: bool) -> None:
    found = ours(precision, Layout(dp_shard=8))
    dp = DataParallel(found, work_of(found))
    matmuls = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    assert dp.work.blocks.low_parameters.max() == (matmuls if low else 0)
    assert dp.gather_bytes[0] == 2


def test_less_memory_is_gathered_and_the_states_are_the_same() -> None:
    wide, low = (footprint(ours(one, Layout(dp_shard=8))) for one in ("bfloat16", "float8-tensorwise"))
    assert low.parameters_bytes[0] == wide.parameters_bytes[0]
    assert low.optimizer_state_bytes[0] == wide.optimizer_state_bytes[0]
    assert low.reserved_bytes[0] < wide.reserved_bytes[0]
