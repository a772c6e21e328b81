"""A run that stopped is the run that never did."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from meshwright.checkpoint.shards import flatten
from meshwright.errors import ExitCode
from meshwright.parallelism.torch_private.torch_compat import local_box
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import AXES
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import TINY_MODEL, FinishedRun, tiny_job, train_on_ranks, train_on_this_rank

DENSE = {**TINY_MODEL, "options": {**TINY_MODEL["options"], "num_layers": 4, "tie_embeddings": True}}
MIXTURE = {"source": "moe-4m", "options": {"dim": 32, "num_layers": 3, "num_experts": 8, "expert_ffn_dim": 16}}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_both_resumes_on_the_same_layout_are_bit_equal(tmp_path: Path, mode: str) -> None:
    straight = train_on_ranks(tiny_job(tmp_path), tmp_path / "straight", 2)
    checkpoint = {"checkpoint": {"mode": mode, "interval": 1}}
    for number, stop_after in enumerate((2, 4)):
        job = tiny_job(tmp_path, train={"stop_after": stop_after}, **checkpoint)
        stopped = train_on_ranks(job, tmp_path / "stopped", 2, resume=number > 0)
        assert stopped.codes == [ExitCode.RETRY] * 2
        assert stopped.manifest.exit == ExitCode.RETRY
    resumed = train_on_ranks(tiny_job(tmp_path, **checkpoint), tmp_path / "stopped", 2, resume=True)
    assert resumed.codes == [ExitCode.DONE] * 2
    assert resumed.parameter_hash == straight.parameter_hash
    assert resumed.losses == straight.losses
    assert [attempt.start_step for attempt in resumed.manifest.attempts] == [0, 2, 4]


def test_a_run_without_a_checkpoint_begins_again_with_the_same_weights(tmp_path: Path) -> None:
    tied = {**TINY_MODEL, "options": {**TINY_MODEL["options"], "tie_embeddings": True}}
    straight = train_on_ranks(tiny_job(tmp_path, model=tied), tmp_path / "straight", 2)
    lost = tmp_path / "lost"
    shutil.copytree(tmp_path / "straight", lost)
    shutil.rmtree(lost / "checkpoints")
    again = train_on_ranks(tiny_job(tmp_path, model=tied), lost, 2, resume=True)
    assert [attempt.start_step for attempt in again.manifest.attempts] == [0, 0]
    assert again.losses == straight.losses
    assert again.parameter_hash == straight.parameter_hash


def warmed_up_state(job: dict[str, Any], folder: str) -> bool:
    """Return whether a training that warmed up while it awaited a state, and found none, is as one that begins.

    The same of one that has got half of a state meanwhile.
    """
    parsed, ranks = Job.from_dict(job), Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    fresh, late = Training.build(parsed, ranks), Training.build(parsed, ranks, awaits_state=True)
    late.warm_up()
    assert late.load_newest(Run(folder)) == 0
    is_equal = has_equal_state(fresh, late)
    for copies in flatten(late.state()).values():
        for copy in copies:
            local_box(copy)[0].data.fill_(3)
    assert late.forget_weights()
    assert late.load_newest(Run(folder)) == 0
    return is_equal and has_equal_state(fresh, late)


def has_equal_state(one: Training, other: Training) -> bool:
    expected, found = (flatten(each.state()) for each in (one, other))
    return expected.keys() == found.keys() and all(
        torch.equal(local_box(mine)[0], local_box(theirs)[0])
        for name in expected
        for mine, theirs in zip(expected[name], found[name], strict=True)
    )


@pytest.mark.parametrize(
    "optimizer", [{}, {"name": "muon"}, {"state_dtype": "int8"}, {"state_dtype": "bfloat16"}], ids=str
)
def test_what_warms_up_and_finds_no_state_begins_as_any_other(tmp_path: Path, optimizer: dict[str, str]) -> None:
    job = tiny_job(tmp_path, model=DENSE, optimizer=optimizer, layout={"pp": 2, "tp": 1, "dp_shard": 1})
    assert run_ranks(warmed_up_state, 2, job, str(tmp_path / "none")) == [True, True]


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_resume_on_other_ranks_goes_on_with_the_same_losses(tmp_path: Path, num_ranks: int) -> None:
    sections = {"train": {"steps": 12, "global_batch_size": 8}, "checkpoint": {"interval": 4, "keep": 9}}
    straight = train_on_ranks(tiny_job(tmp_path, **sections), tmp_path / "straight", 2)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "straight", moved)
    for step in (8, 12):
        shutil.rmtree(moved / "checkpoints" / f"step-{step}")
    resumed = train_on_ranks(tiny_job(tmp_path, **sections), moved, num_ranks, resume=True)
    compared = [step for step in straight.losses if step > 4]
    assert len(compared) == 8
    for step in compared:
        assert resumed.losses[step] == pytest.approx(straight.losses[step], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "saved", "others"),
    [
        pytest.param(DENSE, {"pp": 2, "tp": 2}, [{"dp_shard": 4}], marks=pytest.mark.long),
        pytest.param(DENSE, {"pp": 2, "schedule": "ZBVZeroBubble"}, [{"dp_replicate": 2}], marks=pytest.mark.long),
        pytest.param(
            *(MIXTURE, {"dp_shard": 2, "tp": 2, "ep": 4}, [{}, {"pp": 2, "dp_shard": 2, "ep": 2}]),
            marks=pytest.mark.long,
        ),
        (DENSE, {"pp": 2}, [{"dp_shard": 2}]),
    ],
    ids=str,
)
def test_resume_on_any_layout(
    tmp_path: Path, model: dict[str, Any], saved: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    def run(name: str, layout: dict[str, Any], *, resume: bool, **train: int) -> FinishedRun:
        job = tiny_job(tmp_path, layout={"dp_shard": 1, **layout}, train=train, model=model)
        num_ranks = math.prod(layout.get(axis, 1) for axis in AXES)
        return train_on_ranks(job, tmp_path / name, num_ranks, resume=resume)

    straight = run("straight", saved, resume=False)
    run("stopped", saved, resume=False, stop_after=3)
    for number, layout in enumerate([saved, *others]):
        name = shutil.copytree(tmp_path / "stopped", tmp_path / f"resumed-{number}").name
        resumed = run(name, layout, resume=True)
        if layout == saved:
            assert resumed.parameter_hash == straight.parameter_hash
            assert resumed.losses == straight.losses
        for step in (4, 5, 6):
            assert resumed.losses[step] == pytest.approx(straight.losses[step], rel=1e-5)
            assert resumed.grad_norms[step] == pytest.approx(straight.grad_norms[step], rel=1e-4)


def train_where_the_last_rank_sees_no_checkpoint(job: dict[str, Any], folder: str) -> None:
    """Resume as on a host whose file system does not show the others' files (yet)."""
    is_blind = dist.get_rank() == dist.get_world_size() - 1
    train_on_this_rank(job, folder + "-elsewhere" if is_blind else folder, True)


def test_ranks_that_see_other_checkpoints_do_not_train_from_different_steps(tmp_path: Path) -> None:
    train_on_ranks(tiny_job(tmp_path, train={"stop_after": 3}), tmp_path / "run", 2)
    with pytest.raises(AssertionError, match="run-elsewhere/checkpoints/step-3 does not exist"):
        run_ranks(train_where_the_last_rank_sees_no_checkpoint, 2, tiny_job(tmp_path), str(tmp_path / "run"))


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, checkpoint={"interval": 1, "keep": 2})
    assert train_on_ranks(job, tmp_path / "run", 1).run.checkpoint_steps() == [5, 6]


@pytest.mark.long
def test_validation_is_measured_on_time_and_changes_nothing(tmp_path: Path) -> None:
    plain = train_on_ranks(tiny_job(tmp_path), tmp_path / "plain", 2)
    # At step 3 and 6 a checkpoint follows the validation, and at step 4 training goes on after both.
    every_step = {"train": {"validation_interval": 1}, "checkpoint": {"interval": 3}}
    validated = train_on_ranks(tiny_job(tmp_path, **every_step), tmp_path / "validated", 2)
    assert [row["step"] for row in validated.validation] == [1, 2, 3, 4, 5, 6]
    assert validated.validation[-1]["validation_loss"] < validated.validation[0]["validation_loss"]
    assert validated.parameter_hash == plain.parameter_hash
