"""Rates of attention by kernel and device: what was measured, what published runs keep, what sparse kernels skip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_configs import configs, training_setup
from meshwright.cost.attention_rates import AttentionKernel, kernel_of, kernel_rate, setup_rate
from meshwright.cost.constants import fitted_constants
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import TrainingSetup
from meshwright.errors import UnsupportedError
from meshwright.hardware.catalogue import load_cluster
from meshwright.planner.candidate import judge
from meshwright.planner.explain.faster_attention import attention_words
from meshwright.planner.plan import make_plan
from meshwright.spec.layout.attention_backend import AttentionBackend
from meshwright.spec.layout.layout import Layout
from questions import ask

C = fitted_constants()


def own(model: str = "llama3-8b", cluster: str = "h100-ib400", **workload: object) -> TrainingSetup:
    return training_setup(model, cluster, "meshwright", **workload)


def attention_s(of: TrainingSetup, backend: AttentionBackend = "auto", layout: Layout | None = None) -> float:
    step = step_times(configs(replace(of, attention_backend=backend), layout or Layout(dp_shard=8)))
    # Attention's part of the FLOPs at the peak is in another term, as are those of matmuls.
    return float(step.attention_inefficiency_s[0] + step.model_flops_at_peak_s[0])


def test_a_measured_rate_is_what_was_measured() -> None:
    device, ramp = load_cluster("h200-efa").device, C["attention_ramp_tokens"]
    rate = kernel_rate(device, "cudnn", "eager", C)
    peak = device.peak_flops_per_s("bfloat16")
    assert peak is not None
    reached = peak * rate.share * 4096 / (4096 + ramp)
    assert reached == pytest.approx(597e12, rel=0.01)
    # What a training step reached with heads of 128: 417 of 534 TFLOP/s.
    assert rate.backward == pytest.approx(417 / 534, rel=0.03)
    assert reached * rate.narrow == pytest.approx(436e12, rel=0.01)


@pytest.mark.parametrize(
    ("of", "kernel"),
    [
        (own(), "cudnn"),
        (own(cluster="dgx-a100"), "published"),
        (own(cluster="dgx-b200"), "published"),
        (own(precision="float32"), "published"),
        (training_setup(), "published"),
        (training_setup(stack="megatron-bridge-25"), "published"),
    ],
)
def test_auto_takes_what_torch_takes_and_other_software_what_it_took(
    of: TrainingSetup, kernel: AttentionKernel
) -> None:
    assert kernel_of(of, C) == kernel


def test_published_software_keeps_its_rates() -> None:
    generic, vendor = setup_rate(training_setup(), C), setup_rate(training_setup(stack="megatron-bridge-25"), C)
    assert generic.share == C["attention.hopper"] * C["attention_generic.hopper"]
    assert vendor.share == C["attention.hopper"]


@pytest.mark.parametrize("cluster", ["h100-ib400", "dgx-a100", "dgx-b200", "mi300x-node"])
def test_kernels_of_one_device_are_in_their_order(cluster: str) -> None:
    device = load_cluster(cluster).device
    names: tuple[AttentionKernel, ...] = ("cudnn", "flash", "varlen", "flex", "efficient")
    cudnn, flash, varlen, flex, efficient = (kernel_rate(device, name, "eager", C) for name in names)
    assert cudnn.share >= flash.share >= varlen.share >= flex.share > 0.1
    assert efficient.share == flash.share / 2
    assert flex.backward < flash.backward


def test_documents_of_a_known_length_are_skipped() -> None:
    masked = own(seq_len=16384, masks_documents=True)
    whole, short, long = (
        attention_s(replace(masked, workload=masked.workload.replace(document_tokens=length)), "varlen")
        for length in (None, 500.0, 4000.0)
    )
    assert short < long < whole < attention_s(masked)
    # Their length means nothing to what computes all scores.
    assert attention_s(own(seq_len=16384, masks_documents=True, document_tokens=500.0)) == attention_s(masked)


def test_a_ring_is_made_of_flash_attention() -> None:
    ring, ulysses = (attention_s(own(), layout=Layout(cp=2, cp_method=name)) for name in ("ring", "ulysses"))
    assert ring > ulysses
    assert attention_s(own(), "flash", Layout(cp=2, cp_method="ulysses")) > ulysses


@pytest.mark.slow
def test_a_plan_names_the_kernel_and_a_faster_backend() -> None:
    request = ask("llama3-8b", 8, seq_len=8192, batch=64, cluster="dgx-a100")
    assert "a kernel of torch's SDPA, as torch chooses on a100" in attention_words(Layout(dp_shard=8), request)
    masked = request.workload.replace(masks_documents=True, document_tokens=600.0)
    request = request.with_setup(workload=masked)
    assert "are computed and masked" in attention_words(Layout(dp_shard=8), request)
    plan = make_plan(request)
    (found,) = [one for one in plan.what_ifs if "attention_backend" in one.change]
    assert found.best.layout.attention_backend in ("varlen", "flex")
    assert found.change.startswith(f"layout.attention_backend={found.best.layout.attention_backend}")
    assert found.best.step_s < plan.pick.step_s
    assert plan.attention == attention_words(plan.pick.layout, request)
    own_words = attention_words(found.best.layout, request)
    assert "of 600 tokens in the mean are skipped" in own_words


@pytest.mark.slow
@pytest.mark.parametrize(
    "cluster", [*(pytest.param(name, marks=pytest.mark.long) for name in ("h100-ib400", "dgx-a100")), "dgx-b200"]
)
def test_what_torch_takes_anyway_is_no_faster_backend(cluster: str) -> None:
    plan = make_plan(ask("llama3-8b", 8, cluster=cluster, seq_len=8192, batch=16))
    assert not [one for one in plan.what_ifs if "attention_backend" in one.change]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_devices"), [("llama3.2-1b", 1), pytest.param("llama3-8b", 8, marks=pytest.mark.long)]
)
def test_a_search_keeps_the_backend_that_is_set(model: str, num_devices: int) -> None:
    plan = make_plan(ask(model, num_devices, seq_len=8192, batch=8 * num_devices, attention_backend="flex"))
    assert plan.pick.layout.attention_backend == "flex"
    assert not [one for one in plan.what_ifs if "attention_backend" in one.change]
    assert plan.attention.startswith("FlexAttention")


def test_matmuls_as_attention_are_not_priced() -> None:
    with pytest.raises(UnsupportedError, match=r'"math" computes attention by matmuls .* ask meshwright simulate'):
        judge(Layout(dp_shard=16, attention_backend="math"), ask())


def test_all_layouts_of_a_table_may_have_other_backends() -> None:
    request = ask("llama3-8b", 8, seq_len=8192, batch=64)
    names: tuple[AttentionBackend, ...] = ("auto", "flash", "flex", "varlen", "cudnn", "efficient")
    steps = [judge(Layout(dp_shard=8, attention_backend=name), request).step_s for name in names]
    assert np.argsort(steps)[-1] == names.index("efficient")
    assert steps[0] == steps[4] < steps[1] <= steps[3] < steps[2]
