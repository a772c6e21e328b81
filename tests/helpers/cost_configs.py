"""Settings to price, and layouts that fit them: of any preset, cluster of the catalogue and stack."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from meshwright.cost.layout_table import layout_table
from meshwright.cost.stack_factors import load_stack
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.model.model_spec import ModelSpec, model_spec
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.step.workload import Workload

MODELS = ("llama3-8b", "llama3-70b", "qwen3-0.6b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
BATCH = 1024
SEQ_LEN = 4096


def training_setup(
    model: str = "llama3-8b", cluster: str | Cluster = "h100-ib400", stack: str = "generic", **workload: Any
) -> TrainingSetup:
    """Return a setup; what `workload` does not say is BATCH sequences of SEQ_LEN tokens in bfloat16."""
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": BATCH} | workload
    cluster = _cluster(cluster) if isinstance(cluster, str) else cluster
    return TrainingSetup(_spec(model), Workload(**sizes), cluster, load_stack(stack))


def changed(of: TrainingSetup, **fields: Any) -> TrainingSetup:
    """Return the setup with other fields of its stack."""
    return replace(of, stack=of.stack.replace(**fields))


def configs(of: TrainingSetup, *layouts: Layout) -> Configurations:
    """Return the layouts in one setup."""
    return Configurations.of_one(of, layout_table(layouts))


@st.composite
def layouts(draw: st.DrawFn, model: str, num_ranks: int = 64) -> Layout:
    """Draw a layout of `num_ranks` ranks (a power of two) that is valid for the preset, BATCH and SEQ_LEN."""
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    for _ in range(num_ranks.bit_length() - 1):
        degrees[draw(st.sampled_from(sorted(degrees)))] *= 2
    layout = Layout(
        pp=degrees["pp"],
        dp_replicate=degrees["dp_replicate"],
        dp_shard=degrees["dp_shard"],
        cp=degrees["cp"],
        tp=degrees["tp"],
        ep=draw(st.sampled_from([1, 2, 4, 8])) if _is_mixture(model) else 1,
        microbatch_size=draw(st.sampled_from([1, 2])),
        schedule=draw(st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"])),
        cp_method=draw(st.sampled_from(["all-gather", "ring", "ulysses"])),
        activation_checkpoint=draw(st.sampled_from(["none", "selective", "full"])),
    )
    layout = layout if layout.pp > 1 else layout.replace(schedule="1F1B")
    return layout if _is_valid(layout, model) else Layout(dp_shard=num_ranks)


@cache
def _cluster(name: str) -> Cluster:
    return load_cluster(name)


@cache
def _spec(model: str) -> ModelSpec:
    return model_spec(PRESETS[model])


def _is_mixture(model: str) -> bool:
    return hasattr(PRESETS[model], "num_experts")


def _is_valid(layout: Layout, model: str) -> bool:
    if BATCH % (layout.dp * layout.microbatch_size):
        return False
    number = BATCH // (layout.dp * layout.microbatch_size)
    return not [*split_problems(layout, PRESETS[model], SEQ_LEN), *schedule_problems(layout, number)]
