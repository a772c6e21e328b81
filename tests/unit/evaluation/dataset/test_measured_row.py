"""What a row's cells mean: spellings, numbers, and the stack, cluster, layout and recipe that they stand for."""

from __future__ import annotations

from typing import Any

import pytest

from measured_rows import DENSE, MIXTURE, PIPELINE, row
from meshwright.cost.stack_factors import load_stack, stacks
from meshwright.errors import UnsupportedError
from meshwright.evaluation.dataset.read import measured_run
from meshwright.evaluation.dataset.row import PRECISIONS, RunRow, run_row
from meshwright.evaluation.dataset.run_cluster import USUAL_CLUSTERS, cluster_of
from meshwright.evaluation.dataset.run_stack import recipe_of, stack_of
from meshwright.hardware.catalogue import cluster_names, device_names, load_cluster
from meshwright.spec.layout.layout import Layout


def layout(**cells: Any) -> Layout:
    run = measured_run(row(**cells))
    assert run.layout is not None, run.unsupported_reason
    return run.layout


@pytest.mark.parametrize("spelling", PRECISIONS)
def test_spellings_of_formats_whatever_their_case(spelling: str) -> None:
    for text in (spelling, spelling.upper(), f" {spelling} "):
        assert run_row(row(precision=text)).precision == PRECISIONS[spelling]


def test_a_format_that_is_not_told_is_bfloat16() -> None:
    assert run_row(row(precision=None)).precision == "bfloat16"


def test_numbers_may_be_empty_but_not_garbage() -> None:
    one = run_row({"id": "a", "tp": "4.0", "pp": "", "cp": "few", "dp": "nan", "hidden": "-4"})
    assert one.count("tp") == 4
    assert one.count("pp") is None
    assert one.count("nothing") is None
    for column in ("cp", "dp", "hidden"):
        with pytest.raises(UnsupportedError, match=rf"^{column} = "):
            one.count(column)
    with pytest.raises(UnsupportedError, match="pp is empty"):
        one.required("pp")


def test_step_times_are_stated_or_follow_from_tokens() -> None:
    assert run_row(row()).measured_s == 2.5
    assert run_row(row(step_time_s=None, step_time_calc_s=3)).measured_s == 3
    from_tokens = run_row(row(step_time_s=None, tokens_per_s_per_gpu=8192))
    assert from_tokens.measured_s == 128 * 8192 / (64 * 8192)
    assert run_row(row(step_time_s=None)).measured_s is None


def test_memory_is_read_as_gib() -> None:
    assert run_row(row()).measured_bytes == 40 * 2**30
    assert run_row(row(mem_gb_per_gpu=None)).measured_bytes is None


def test_a_source_is_its_family_else_itself() -> None:
    assert run_row(row(source_family="family")).source == "family"
    assert run_row(row()).source == "made up"
    assert RunRow({}).source == "unnamed"


@pytest.mark.parametrize(("pattern", "name"), USUAL_CLUSTERS.items())
def test_every_usual_cluster_is_in_the_catalogue(pattern: str, name: str) -> None:
    cluster, _, device = name.partition("/")
    assert cluster in cluster_names()
    assert not device or device in device_names()
    assert load_cluster(cluster).inter_node is not None or load_cluster(cluster).num_devices > 0


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("H100-80GB", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("h100 nvl 94GB", "h100-nvl"),
        ("A100-40GB", "a100-sxm-40gb"),
        ("A100-SXM4-80GB", "a100-sxm-80gb"),
        ("GB200", "gb200"),
        ("B200", "b200"),
        ("MI300X", "mi300x"),
        ("RTX 4090", "rtx-4090"),
        ("h100-roce400", "h100-sxm"),
    ],
)
def test_devices_by_any_of_their_names(gpu: str, device: str) -> None:
    assert cluster_of(run_row(row(gpu=gpu)), []).device.name == device


def test_a_stated_network_is_taken_and_a_silent_one_assumed() -> None:
    assumed: list[str] = []
    stated = cluster_of(run_row(row(interconnect="RoCE 8x 200 Gb/s")), assumed)
    assert assumed == []
    assert stated.inter_node_bytes_per_s_per_device == 200e9 / 8
    shared = cluster_of(run_row(row(interconnect="100 Gb/s per node")), assumed)
    assert shared.inter_node_bytes_per_s_per_device == 100e9 / 8 / 8
    cluster_of(run_row(row(interconnect=None)), assumed)
    assert assumed == ["network of h100-ib400: 400 Gb/s for each device"]


def test_nodes_and_domains_are_the_rows() -> None:
    four = cluster_of(run_row(row(gpus_per_node=4)), [])
    assert (four.devices_per_node, four.domain_size, four.num_nodes) == (4, 4, 16)
    rack = cluster_of(run_row(row(gpu="GB200", gpus_per_node=4, nvlink_domain=72)), [])
    assert (rack.devices_per_node, rack.domain_size) == (4, 72)


def test_degrees_multiply_to_the_devices() -> None:
    for cells in ({}, {"tp": 8, "cp": 2}, {"pp": 4, "tp": 2, "cp": 2}, {"tp": None, "cp": None}):
        assert layout(**cells).num_ranks == 64
    assert layout().dp_shard == 32
    assert layout(tp=4, cp=2, pp=2).dp == 4


def test_how_parameters_are_shared_is_the_rows() -> None:
    assert (layout(fsdp_zero_stage="hsdp").dp_replicate, layout(fsdp_zero_stage="hsdp").dp_shard) == (4, 8)
    assert layout(fsdp_group=16).dp_shard == 16
    assert layout(fsdp_zero_stage="2").reshard_after_forward == "never"
    assert layout(fsdp_zero_stage="0").dp_shard == 1


def test_recomputation_is_the_rows() -> None:
    assert layout(activation_ckpt="full").activation_checkpoint == "full"
    assert layout(activation_ckpt="none").activation_checkpoint == "none"
    every_second = layout(activation_ckpt="selective-layer")
    assert (every_second.activation_checkpoint, every_second.activation_checkpoint_every) == ("full", 2)


def test_virtual_stages_ask_for_a_schedule_that_has_them() -> None:
    interleaved, plain = (layout(**{**PIPELINE, "vpp": vpp}) for vpp in ("2", "1"))
    assert (interleaved.schedule, interleaved.stages_per_rank) == ("Interleaved1F1B", 2)
    assert (plain.schedule, plain.stages_per_rank) == ("1F1B", 1)


def test_experts_are_shared_only_where_there_are_any() -> None:
    assert layout(ep=8).ep == 1
    assert layout(**MIXTURE).ep == 8
    split = layout(**{**MIXTURE, "tp": 2, "etp": 2})
    assert (split.ep, split.etp) == (8, 2)


def test_a_stack_that_is_known_keeps_what_was_fitted() -> None:
    known = load_stack("torchtitan-2025")
    found = stack_of(run_row(row()))
    assert (found.name, found.compute, found.communication) == (known.name, known.compute, known.communication)


def test_a_stack_of_another_year_does_what_its_relative_does_without_its_constants() -> None:
    found = stack_of(run_row(row(stack="llm-foundry-2031")))
    relative = stacks()["llm-foundry-2023"]
    assert found.name == "generic (does what llm-foundry-2023 does)"
    assert (found.kernels, found.joins_loss) == (relative.kernels, relative.joins_loss)
    assert (found.compute, found.communication, found.overhead, found.num_runs) == (1, 1, 1, 0)


def test_of_a_framework_the_nearest_year_is_taken() -> None:
    of_2020 = stack_of(run_row(row(stack="megatron-2019")))
    assert of_2020.name == "generic (does what megatron-2020 does)"
    fork = stack_of(run_row(row(stack="bespoke-2021", framework="megatron")))
    assert fork.name == "generic (does what megatron-2021 does)"
    # The longest name that fits says most.
    assert "megatron-bridge-26" in stack_of(run_row(row(stack="megatron-bridge-27"))).name


def test_only_rows_that_say_so_are_taken_to_be_tuned() -> None:
    cells = {"stack": "megatron-core-2023"}
    assert stack_of(run_row(row(**cells, tuned="yes"))).is_tuned
    assert not stack_of(run_row(row(**cells, tuned="no"))).is_tuned
    assert not stack_of(run_row(row(**cells))).is_tuned


def test_what_is_usual_stands_in_for_what_is_not_told() -> None:
    def stack(name: str = "my-own-thing", **cells: Any) -> Any:
        return stack_of(run_row(row(**{"stack": name, "compile": None, "flash_attn": None, **cells})))

    assert stack().kernels == "eager"
    assert stack(kernels="fused").kernels == "fused"
    assert stack(dispatcher="fused").dispatcher == "fused"
    assert stack("my-own-thing-2021").attention == "unfused"
    assert stack("my-own-thing-2021", flash_attn="yes").attention == "flash"
    assert stack("my-own-thing-2024").attention == "flash"


@pytest.mark.parametrize("name", ["my-own-thing", None, "generic"])
def test_a_stack_that_nobody_knows_is_generic_and_says_so(name: str | None) -> None:
    found = stack_of(run_row(row(stack=name)))
    assert found.name.startswith("generic")
    assert found.num_runs == 0


def test_what_columns_tell_of_the_software_is_taken() -> None:
    def stack(**cells: Any) -> Any:
        return stack_of(run_row(row(**{"stack": "my-own-thing", **cells})))

    assert stack(fsdp_zero_stage="1").sharding == "optimizer"
    assert stack(fsdp_zero_stage="3").sharding == "parameters"
    assert stack(flash_attn="no").attention == "unfused"
    assert stack(compile="no").kernels == "eager"
    assert stack(sp="no").sequence_parallel is False
    assert stack(async_tp="yes").tp_overlap is True
    assert stack(gradient_dtype="bf16").gradient_accumulation_dtype == "bfloat16"
    assert stack(early_stop="no").recompute_stops_early is False
    assert stack(fsdp_zero_stage=None, tp=8).sharding == "optimizer"


RECIPE = MIXTURE | {"model_family": "deepseek-v3", "gpu": "B200", "precision": "mxfp8", "ep": "32", "pp": "8"}


def recipe(**cells: Any) -> dict[str, Any]:
    return recipe_of(run_row(row(RECIPE, **cells)))


def test_the_newest_recipe_not_after_a_release_is_taken() -> None:
    def of_release(release: str) -> dict[str, Any]:
        return recipe(release=release, ep=8, pp=16, global_batch=2048)

    assert of_release("25.11")["dispatcher"] == "alltoall"
    assert of_release("26.02")["dispatcher"] == "fused"
    assert of_release("26.01") == of_release("25.11")
    # Before the first that is known they were like it.
    assert of_release("20.01") == recipe(ep=8, pp=16, global_batch=2048) == of_release("25.11")


def test_a_recipe_is_that_of_the_runs_variant() -> None:
    newest = recipe(release="26.06", global_batch=4096)
    assert newest["ep_overlap"]
    assert newest["cuda_graphs"] == "blocks"


def test_recipes_set_fields_of_a_stack() -> None:
    assert stack_of(run_row(row(RECIPE, release="26.06", global_batch=4096))).ep_overlap
    assert recipe(model_family="nobody's") == {}
    assert recipe(gpu="MI300X") == {}
    for name in recipe():
        assert name in type(load_stack("generic")).model_fields


def test_recipes_are_for_tuned_stacks_only() -> None:
    assert not stack_of(run_row(row(RECIPE, release="26.06", global_batch=4096, stack="generic"))).ep_overlap


def test_the_row_of_these_tests_is_whole() -> None:
    assert measured_run(row(DENSE)).assumed == ()


ATTENTION = ("blocks.*.attention.*",)


@pytest.mark.parametrize(
    ("cells", "kind", "rank", "targets", "assumed"),
    [
        ({}, "none", 16, ("blocks.*",), []),
        ({"notes": "full fine-tune; memory row only"}, "none", 16, ("blocks.*",), []),
        ({"notes": "layout from a log; LoRA r=8 on frozen base (attention), packed"}, "lora", 8, ATTENTION, []),
        (
            {"notes": "LoRA rank 32, 4 concurrent adapters"},
            "lora",
            32,
            ("blocks.*",),
            ["all linear layers", "one adapter"],
        ),
        ({"adapter": "dora (attention)", "notes": "LoRA rank 32"}, "dora", 16, ATTENTION, ["adapter.rank=16"]),
    ],
)
def test_what_is_trained(
    cells: dict[str, str], kind: str, rank: int, targets: tuple[str, ...], assumed: list[str]
) -> None:
    run = measured_run(row(**cells))
    assert run.setup is not None
    found = run.setup.workload.adapter
    assert (found.kind, found.rank, found.targets) == (kind, rank, targets)
    assert all(any(word in one for one in run.assumed) for word in assumed)


def test_recomputation_of_some_blocks_and_activations_on_the_host() -> None:
    blocks = run_row(row()).required("n_layers")
    some = layout(activation_ckpt=f"full-block{blocks // 4}")
    assert (some.activation_checkpoint, some.activation_checkpoint_every) == ("full", 4)
    moved = layout(activation_ckpt="full+offload")
    assert (moved.activation_checkpoint, moved.activation_offload) == ("full", True)
    assert not some.activation_offload


def test_chunks_of_a_loss_are_stated_or_remarked() -> None:
    assert layout().loss_chunks == 1
    assert layout(loss_chunks=4).loss_chunks == 4
    assert layout(notes="fused chunked LM head").loss_chunks == 16
