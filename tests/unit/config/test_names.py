"""Keys that a job does not have: which one was meant."""

import pytest

from meshwright.config.keys import SECTIONS, job_keys
from meshwright.config.names import ALIASES, SECTION_ALIASES, advice_for_key, meant_section


def test_every_alias_leads_to_a_key_that_exists() -> None:
    keys = [meant for meant in ALIASES.values() if " " not in meant]
    assert keys
    assert set(keys) <= set(job_keys())
    assert set(SECTION_ALIASES.values()) <= set(SECTIONS)


def test_no_alias_hides_a_key() -> None:
    names = {key.name for key in job_keys().values()} | set(job_keys())
    assert names.isdisjoint(ALIASES)
    assert set(SECTIONS).isdisjoint(SECTION_ALIASES)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.setps", "train.steps"),
        ("train.lr", "optimizer.learning_rate"),
        ("train.learning_rate", "optimizer.learning_rate"),
        ("train.activation_checkpoint", "layout.activation_checkpoint"),
        ("optimiser.lr", "optimizer.learning_rate"),
        ("train.batch_size", "train.global_batch_size"),
        ("training.local_batch_size", "layout.microbatch_size"),
        ("layout.tensor_parallel_degree", "layout.tp"),
        ("layout.dp", "layout.dp_shard"),
        ("layout.dp_shards", "layout.dp_shard"),
        ("train.max_steps", "train.steps"),
        ("checkpoint.every", "checkpoint.interval"),
        ("num_train_steps", "train.steps"),
        ("seed", "train.seed"),
        ("optimizer.warmup", "optimizer.warmup_steps"),
        ("lr_scheduler.warmup_steps", "optimizer.warmup_steps"),
        ("activation_checkpoint.mode", "layout.activation_checkpoint"),
        ("checkpoint.folder", "run.dir"),
        ("checkpoint.intervall", "checkpoint.interval"),
        ("model.name", "model.source"),
        ("job.dump_folder", "run.dir"),
        ("data.vocab", None),
    ],
)
def test_the_key_that_was_meant(written: str, meant: str | None) -> None:
    advice = advice_for_key(written)
    assert (
        advice == f"did you mean {meant}?" if meant else advice.startswith("leave it out, or use one of [data]'s keys")
    )


def test_words_that_stand_for_no_single_key_are_explained() -> None:
    assert advice_for_key("train.gradient_accumulation_steps") == (
        "follows from train.global_batch_size, layout.microbatch_size and the data-parallel degrees"
    )
    assert advice_for_key("train.num_epochs") == "a run is counted in steps: set train.steps"


@pytest.mark.parametrize(("written", "meant"), [("trian", "train"), ("parallelism", "layout"), ("zzz", None)])
def test_the_section_that_was_meant(written: str, meant: str | None) -> None:
    assert meant_section(written) == meant


@pytest.mark.parametrize("written", ["memory.checkpoint", "memory.egm"])
def test_a_pool_for_checkpoints_is_refused_with_its_reason(written: str) -> None:
    assert advice_for_key(written).startswith("checkpoints gather nothing on a device that extended GPU memory could")
