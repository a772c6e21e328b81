"""Which float8 recipe and layers a job comes to on a device, and the sentence that says why they are others."""

from typing import Any

import pytest

from meshwright.hardware.catalogue import with_example_rates
from meshwright.hardware.choice import choose_cluster
from meshwright.planner.float8_choice import choose_float8
from meshwright.spec.job.job import Job


def job_of(recipe: str, seq_len: int = 4096, model: str = "llama3-8b", compiles: bool = True, **more: Any) -> Job:
    precision = {"compute": "bfloat16", "float8": recipe, **more}
    return Job.from_dict(
        {
            "model": {"source": model},
            "train": {"seq_len": seq_len},
            "precision": precision,
            "layout": {"compile": compiles},
        }
    )


@pytest.mark.parametrize(
    ("wanted", "cluster", "found", "why"),
    [
        ("mxfp8", "b200:8", "mxfp8", ""),
        ("mxfp8", "h100:8", "rowwise", 'has no units for MXFP8\'s scales of blocks; computed by "rowwise"'),
        ("rowwise", "h100:8", "rowwise", ""),
        ("rowwise_with_gw_hp", "a100:8", "none", "has no float8 units; computed in bfloat16"),
        ("tensorwise", "mi300x:8", "none", "was never tried in float8"),
        ("tensorwise", "local:1", "none", "computes float8 emulated, in more time than without; priced in bfloat16"),
    ],
)
def test_a_recipe_steps_down_to_what_the_device_runs(wanted: str, cluster: str, found: str, why: str) -> None:
    choice = choose_float8(job_of(wanted), with_example_rates(choose_cluster(cluster)))
    assert choice.precision.float8 == found
    assert why in choice.note
    assert bool(choice.note) == bool(why)


@pytest.mark.parametrize(
    ("architecture", "found"), [("hopper", "rowwise"), ("blackwell", "mxfp8"), ("cdna", "none"), (None, "none")]
)
def test_another_makers_device_with_a_float8_rate_is_one_of_the_family_that_it_names(
    architecture: str | None, found: str
) -> None:
    h100 = choose_cluster("h100:8")
    own = h100.replace(device=h100.device.replace(vendor="example", architecture=architecture))
    assert choose_float8(job_of("mxfp8"), own).precision.float8 == found


def test_training_on_a_host_emulates() -> None:
    choice = choose_float8(job_of("rowwise"), with_example_rates(choose_cluster("local:1")), emulates=True)
    assert choice.precision.float8 == "rowwise"
    assert choice.note == 'precision.float8 = "rowwise": cpu-local computes float8 emulated, in more time than without'


@pytest.mark.parametrize("emulates", [True, False])
def test_a_filter_on_a_host_leaves_no_layer(emulates: bool) -> None:
    host = with_example_rates(choose_cluster("local:1"))
    choice = choose_float8(job_of("rowwise", float8_filter="slower"), host, emulates=emulates)
    assert choice.precision.float8 == "none"
    assert "emulated, in more time than without, so that every layer stays in bfloat16" in choice.note


def test_experts_that_are_slower_are_named_and_a_filter_leaves_them() -> None:
    h100 = choose_cluster("h100:8")
    plain = choose_float8(job_of("tensorwise", model="mixtral-8x7b", float8_experts=True), h100)
    assert plain.precision.float8_experts
    assert "experts are predicted to be slower in float8 on h100-sxm" in plain.note
    job = job_of("tensorwise", model="mixtral-8x7b", float8_experts=True, float8_filter="slower")
    filtered = choose_float8(job, h100)
    assert (filtered.precision.float8, filtered.precision.float8_experts) == ("tensorwise", False)
    assert "the experts stay in bfloat16, predicted to be slower" in filtered.note


def test_layers_that_are_slower_stay_and_large_ones_do_not() -> None:
    h100 = choose_cluster("h100:8")
    choice = choose_float8(job_of("rowwise", 2048, float8_filter="slower"), h100)
    assert choice.precision.float8 == "rowwise"
    assert "blocks.*.attention.key" in choice.precision.float8_skip
    assert "blocks.*.ffn.gate" not in choice.precision.float8_skip
    assert "predicted to be slower in float8 on h100-sxm" in choice.note
    assert choose_float8(job_of("rowwise", 8192, float8_filter="slower"), h100).precision.float8_skip == ()


@pytest.mark.parametrize(("seq_len", "compiles"), [(256, True), (4096, False)])
def test_a_job_of_which_no_layer_is_left_is_none_in_float8(seq_len: int, compiles: bool) -> None:
    job = job_of("tensorwise", seq_len, compiles=compiles, float8_filter="slower")
    choice = choose_float8(job, choose_cluster("h100:8"))
    assert choice.precision.matmuls == "bfloat16"
    assert "no layer of a block is left; computed in bfloat16" in choice.note


def test_patterns_that_skip_every_layer_leave_no_float8() -> None:
    choice = choose_float8(job_of("rowwise", float8_skip=["blocks.*"]), choose_cluster("h100:8"))
    assert choice.precision.matmuls == "bfloat16"


def test_a_degree_of_the_layout_changes_no_choice() -> None:
    job, h100 = job_of("rowwise", 2048, float8_filter="slower"), choose_cluster("h100:8")
    split = job.replace(layout=job.layout.replace(tp=8))
    assert choose_float8(split, h100) == choose_float8(job, h100)


def test_blocks_with_ring_attention_under_selective_recomputation_are_priced_as_not_compiled() -> None:
    job, h100 = job_of("tensorwise", float8_filter="slower"), choose_cluster("h100:8")
    ring = job.layout.replace(cp=2, cp_method="ring")
    assert choose_float8(job.replace(layout=ring), h100).precision.float8 == "tensorwise"
    selective = job.replace(layout=ring.replace(activation_checkpoint="selective"))
    assert choose_float8(selective, h100).precision.matmuls == "bfloat16"


def test_what_is_settled_settles_to_itself() -> None:
    job, h100 = job_of("mxfp8", 2048, float8_filter="slower"), choose_cluster("h100:8")
    settled = choose_float8(job, h100).precision
    assert choose_float8(job.replace(precision=settled), h100).precision == settled


def test_a_mixture_names_the_layers_of_its_dense_blocks() -> None:
    job = job_of("tensorwise", 1024, "deepseek-v3", float8_filter="slower")
    skipped = choose_float8(job, choose_cluster("h100:8")).precision.float8_skip
    assert all("router" not in name for name in skipped)
