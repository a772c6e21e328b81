"""What a job derives from its keys, and which keys contradict each other."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.spec.job.job import DEFAULT_GLOBAL_BATCH_SIZE, Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.workload import Workload


def job(**sections: dict[str, Any]) -> Job:
    return Job.from_dict(sections)


def test_a_default_job_has_no_problems() -> None:
    assert Job().problems() == []
    assert Job().global_batch_size == DEFAULT_GLOBAL_BATCH_SIZE


def test_the_batch_comes_from_sequences_or_tokens() -> None:
    assert job(train={"global_batch_size": 12}).global_batch_size == 12
    assert job(train={"global_batch_tokens": 16_777_216, "seq_len": 8192}).global_batch_size == 2048


def test_the_workload_is_what_one_step_processes() -> None:
    workload = job(train={"global_batch_size": 12, "seq_len": 64}, precision={"compute": "bfloat16"}).workload
    assert (workload.seq_len, workload.global_batch_size, workload.global_batch_tokens) == (64, 12, 768)
    assert (workload.precision, workload.matmul_dtype, workload.gradient_dtype) == ("bfloat16", "bfloat16", "float32")
    assert Workload.from_json(workload.to_json()) == workload


@given(st.integers(1, 2000), st.integers(1, 16), st.integers(1, 4), st.integers(1, 8), st.sampled_from([None, 64]))
def test_microbatches_cover_the_batch_or_the_nearest_batches_are_named(
    size: int, dp_shard: int, dp_replicate: int, microbatch_size: int, seq_len: int | None
) -> None:
    train = {"global_batch_size": size} if seq_len is None else {"global_batch_tokens": size * 64, "seq_len": 64}
    layout = Layout(dp_shard=dp_shard, dp_replicate=dp_replicate, microbatch_size=microbatch_size, tp=3)
    sequences = dp_shard * dp_replicate * microbatch_size
    if size % sequences == 0:
        assert job(train=train).num_microbatches(layout) * sequences == size
        return
    with pytest.raises(ConfigError) as caught:
        job(train=train).num_microbatches(layout)
    key, _, choices = str(caught.value).rpartition(": set ")[2].partition(" to ")
    assert key in {f"train.{name}" for name in train}
    batches, _, sizes = choices.partition(", or layout.microbatch_size to ")
    assert not sizes or size % microbatch_size
    for choice in batches.split(" or "):
        changed = job(train={**train, key.removeprefix("train."): int(choice)})
        assert changed.num_microbatches(layout) >= 1


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"train": {"global_batch_size": 8, "global_batch_tokens": 2048}},
         "train.global_batch_size = 8 and train.global_batch_tokens = 2048 are both given: keep one of them"),
        ({"train": {"global_batch_tokens": 1000, "seq_len": 300}, "layout": {"dp_shard": 2}},
         "train.global_batch_tokens = 1000 is no multiple of train.seq_len = 300: set "
         "train.global_batch_tokens to 600 or 1200"),
        ({"train": {"global_batch_tokens": 100, "seq_len": 300}, "layout": {"dp_shard": -1}},
         "train.global_batch_tokens = 100 is no multiple of train.seq_len = 300: set "
         "train.global_batch_tokens to 300 or 600"),
        ({"train": {"global_batch_size": 6}, "layout": {"dp_shard": 2, "microbatch_size": 2}},
         "train.global_batch_size = 6 does not divide by 2 data-parallel ranks x layout.microbatch_size = 2: set "
         "train.global_batch_size to 4 or 8, or layout.microbatch_size to 1 or 3, or layout.tp to 2 and "
         "layout.dp_shard to 1, or layout.pp to 2 and layout.dp_shard to 1"),
        ({"train": {"global_batch_size": 7}, "layout": {"dp_shard": 2, "microbatch_size": 2}},
         "train.global_batch_size = 7 does not divide by layout.microbatch_size = 2: set "
         "train.global_batch_size to 4 or 8"),
        ({"train": {"global_batch_size": 16}, "layout": {"dp_shard": 2, "microbatch_size": 3}},
         "train.global_batch_size = 16 does not divide by layout.microbatch_size = 3: set "
         "train.global_batch_size to 12 or 18, or layout.microbatch_size to 2 or 4"),
        ({"train": {"global_batch_tokens": 768}, "layout": {"dp_replicate": 2}},
         "train.global_batch_tokens = 768 (3 sequences) does not divide by 2 data-parallel ranks x "
         "layout.microbatch_size = 1: set train.global_batch_tokens to 512 or 1024"),
        ({"train": {"steps": 5, "stop_after": 6}},
         "train.stop_after = 6 lies after train.steps = 5: set train.stop_after to 5, or leave "
         "train.stop_after out"),
        ({"train": {"steps": 5}, "optimizer": {"warmup_steps": 11}},
         "optimizer.warmup_steps = 11 is more than train.steps = 5: set optimizer.warmup_steps to 5 or less"),
        ({"train": {"validation_interval": 5}, "data": {"validation_fraction": 0}},
         "train.validation_interval = 5 but data.validation_fraction = 0 keeps no samples for validation: set "
         "train.validation_interval to 0, or data.validation_fraction to 0.02"),
        ({"run": {"hang_limit_s": 0.5}},
         "run.hang_limit_s = 0.5 is less than 1 s, which the launcher needs to distinguish a hang from a step: set "
         "run.hang_limit_s to \"auto\" or 0.0"),
        ({"layout": {"memory_budget_bytes": 1000}},
         "layout.memory_budget_bytes = 1000 has nothing to apply with layout.activation_checkpoint = \"none\": set "
         "layout.activation_checkpoint to \"auto\", or leave layout.memory_budget_bytes out"),
    ],
)  # fmt: skip
def test_a_contradiction_is_told_once(sections: dict[str, Any], problem: str) -> None:
    assert job(**sections).problems() == [problem]


def test_a_trial_run_may_be_shorter_than_the_default_warmup() -> None:
    assert job(train={"steps": 3}).problems() == []


def test_with_a_rest_what_is_wrong_anyhow_is_told() -> None:
    layout = {"dp_shard": -1, "dp_replicate": 3, "tp": 3, "ep": 2, "activation_checkpoint_every": 2}
    keys = [text.split()[0] for text in job(layout=layout).problems()]
    assert keys == ["layout.tp", "layout.ep", "layout.activation_checkpoint_every"]
    assert job(layout={"tp": -1}).problems() == []


def test_axes_beyond_data_parallelism_do_not_split_the_batch() -> None:
    layout = {"pp": 2, "tp": 4, "cp": 2, "dp_shard": 4}
    assert job(train={"global_batch_size": 16}, layout=layout).problems() == []
    assert job(train={"global_batch_size": 16}).num_microbatches(Layout(**layout)) == 4
