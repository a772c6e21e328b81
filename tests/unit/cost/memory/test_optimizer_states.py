"""Bytes of optimizer states by kind and format: the formula against the tensors that the trainer makes."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import footprint
from meshwright.cost.stack_factors import load_stack
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.catalogue import load_cluster
from meshwright.models.build import build_architecture
from meshwright.models.initial import initialize
from meshwright.spec.job.sections import OptimizerSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.step.workload import Workload
from meshwright.trainer.optimizer.optimizer import build_optimizer, optimizer_state

NUM_PARAMETERS = model_spec(PRESETS["llama3-8b"]).num_parameters
KINDS = [
    ("adamw", "float32"),
    ("adamw", "bfloat16"),
    ("muon", "float32"),
    ("muon", "bfloat16"),
    pytest.param("adamw", "int8", marks=pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")),
]


def setup_of(model: str, **workload: object) -> TrainingSetup:
    given = {"seq_len": 4096, "global_batch_size": 64, **workload}
    return TrainingSetup(
        model_spec(PRESETS[model]), Workload.from_dict(given), load_cluster("h100-ib400"), load_stack("meshwright")
    )


@pytest.mark.parametrize("model", ["llama-1m", "moe-4m"])
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_states_take_the_predicted_bytes(model: str, name: str, dtype: str) -> None:
    module = build_architecture(PRESETS[model])
    initialize(module, 0)
    optimizer = build_optimizer(module, OptimizerSection.from_dict({"name": name, "state_dtype": dtype}))
    measured = sum(
        tensor.numel() * tensor.element_size()
        for states in optimizer_state(module, optimizer).values()
        for key, (tensor,) in states.items()
        if key != "step"
    )
    setup = setup_of(model, optimizer=name, optimizer_state_dtype=dtype)
    predicted = footprint(Configurations.of_one(setup, layout_table([Layout()]))).optimizer_state_bytes[0]
    # The router's bias of a mixture is no op of the formula.
    assert predicted == pytest.approx(measured, rel=1e-4)


def test_what_muon_adds_is_shared_by_the_ranks_that_hold_the_matrices() -> None:
    layouts = layout_table([Layout(dp_shard=n) for n in (8, 16, 32, 512)])
    muon, adamw = (
        step_times(Configurations.of_one(setup_of("llama3-8b", optimizer=name, global_batch_size=512), layouts))
        for name in ("muon", "adamw")
    )
    # 5 kernels start on each rank for each matrix of which it holds a part.
    parts_s = 32 * 7 * 5 * fitted_constants()["kernel_s"]
    more_s = muon.optimizer_s - adamw.optimizer_s - parts_s
    assert more_s[0] / more_s[1] == pytest.approx(2, rel=0.05)
    assert more_s[1] / more_s[2] == pytest.approx(2, rel=0.05)
    # 5 x (4 s^2 l + 2 s^3) FLOPs of 4096 x 14336: beyond as many ranks as matrices one of them is the least.
    least = 5 * (4 * 4096**2 * 14336 + 2 * 4096**3) / 989e12
    assert least < more_s[3] < 3 * least
    sent_s = muon.dp_communication_s - adamw.dp_communication_s
    assert (sent_s > 0).all()
    # Two bytes of each element of a shard there and back, within a node at 450 GB/s at most.
    assert sent_s[0] > 2 * 2 * 7e9 / 8 / 450e9
    assert np.isfinite(muon.total_s).all()


def test_updates_in_backward_hide_behind_it_and_keep_no_gradients() -> None:
    layouts = layout_table([Layout(dp_shard=8)])
    after, inside = (
        Configurations.of_one(
            setup_of("llama3-8b", seq_len=512, global_batch_size=8, updates_in_backward=is_inside), layouts
        )
        for is_inside in (False, True)
    )
    ends = 2 * 128_256 * 4096 / NUM_PARAMETERS
    # Nothing scales or clips gradients then.
    expected = ends * 28 / (28 + load_stack("meshwright").gradient_bytes)
    assert step_times(inside).optimizer_s[0] / step_times(after).optimizer_s[0] == pytest.approx(expected, rel=0.02)
    saved = footprint(after).allocated_bytes[0] - footprint(inside).allocated_bytes[0]
    # With few activations the peak is where all gradients would be.
    assert 0 < saved <= 4 * NUM_PARAMETERS / 8
