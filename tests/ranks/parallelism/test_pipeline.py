"""A pipeline computes what one process computes, under every schedule, and every rank knows the loss."""

from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from meshwright.parallelism.mesh import build_meshes
from meshwright.prover.prove import ProofRequest, prove
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.layout.layout_text import layout_text, parse_layout
from meshwright.spec.layout.schedule.action import orders_to_csv
from meshwright.spec.layout.schedule.schedule import build_schedule
from run_ranks import run_ranks
from training_runs import TINY_MODEL, tiny_job, train_on_ranks


def holds(*layouts: str, **options: Any) -> None:
    check({**TINY_MODEL, "options": {**TINY_MODEL["options"], "num_layers": 4, **options}}, *layouts)


def check(model: dict[str, Any], *layouts: str) -> None:
    request = ProofRequest(Job.from_dict({"model": model}), list(map(parse_layout, layouts)), num_steps=2)
    for one in prove(request, lambda _: None).layouts:
        assert one.holds, f"{layout_text(one.layout)}: {one.problem or one.worst}"


def test_every_schedule_trains_as_one_process() -> None:
    # One run in one process is compared with all.
    holds(*(f"pp=2,schedule={schedule}" for schedule in SCHEDULES))


def test_stages_may_be_uneven_or_recomputed_and_pipelines_side_by_side() -> None:
    # Of the second pipeline, ranks 1 and 3, rank 1 is not the job's rank 1.
    recomputed = "pp=2,schedule=ZBVZeroBubble,activation_checkpoint=selective"
    holds("pp=2,stage_boundaries=3", recomputed, "pp=2,dp_shard=2,tp=1")


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(one, marks=() if one == "ZBVZeroBubble" else pytest.mark.long) for one in ("1F1B", *V_SCHEDULES)],
)
def test_tied_embeddings_get_the_gradients_of_both_stages(schedule: str) -> None:
    holds(f"pp=2,tp=2,schedule={schedule}", tie_embeddings=True)


def test_a_schedule_is_read_from_a_file(tmp_path: Path) -> None:
    texts = []
    for like in ("GPipe", "ZBVZeroBubble"):
        layout = Layout(pp=2, schedule=like)
        path = tmp_path / f"{like}.csv"
        path.write_text(orders_to_csv(build_schedule(layout, 4).actions))
        texts.append(f"pp=2,schedule={path},virtual_stages={layout.stages_per_rank}")
    holds(*texts)


def test_a_split_backward_sums_microbatches_in_float32(tmp_path: Path) -> None:
    # In bfloat16 a sum of several microbatches would lose what one backward after another adds in float32.
    layout = {"dp_shard": 1, "pp": 2, "virtual_stages": 2}
    losses = []
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        how = {"layout": {**layout, "schedule": schedule}, "precision": {"compute": "bfloat16"}}
        job = tiny_job(tmp_path, train={"steps": 3}, **how)
        losses.append(train_on_ranks(job, tmp_path / schedule, 2).losses)
    assert losses[0] == losses[1]


def test_a_token_counts_once_however_often_it_is_recomputed() -> None:
    # DualPipeV splits the backward of some microbatches only: recomputed twice, they must not weigh more in the bias.
    model = {"source": "mla-moe-4m", "options": {"router": {"bias_update_rate": 0.01}}}
    check(model, "pp=2,schedule=DualPipeV,activation_checkpoint=full")


@pytest.mark.long
def test_a_split_backward_sums_the_gradients_of_experts_over_replicas_at_once() -> None:
    # The backward to the experts' last weight starts at their output, where FSDP2's hook is.
    how = "schedule=InterleavedZeroBubble,microbatch_size=1,gradient_sync=microbatch"
    check({"source": "moe-4m"}, f"pp=2,dp_replicate=2,tp=2,{how}")


def test_every_rank_logs_the_loss_of_the_last_stage(tmp_path: Path) -> None:
    train = {"steps": 3}
    finished = train_on_ranks(tiny_job(tmp_path, train=train, layout={"dp_shard": 1, "pp": 2}), tmp_path / "run", 2)
    one = train_on_ranks(tiny_job(tmp_path, train=train, layout={"dp_shard": 1}), tmp_path / "one", 1)
    assert finished.losses == pytest.approx(one.losses, rel=2e-6)
    assert all(loss > 0 for loss in finished.losses.values())
    assert [row["validation_loss"] for row in finished.validation] == pytest.approx(
        [row["validation_loss"] for row in one.validation], rel=2e-6
    )


LONG = pytest.mark.long
LOOPED = [
    pytest.param("Interleaved1F1B", 2, 2, marks=LONG),
    pytest.param("Interleaved1F1B", 3, 2, marks=LONG),
    pytest.param("LoopedBFS", 2, 2, marks=LONG),
    pytest.param("Interleaved1F1B", 2, 4, marks=LONG),
    pytest.param("ZBVZeroBubble", 2, 4, marks=LONG),
    pytest.param("GPipe", 1, 4, marks=LONG),
]


@pytest.mark.parametrize(("schedule", "virtual_stages", "num_ranks"), LOOPED)
def test_validation_runs_through_every_stage_of_a_rank(
    tmp_path: Path, schedule: str, virtual_stages: int, num_ranks: int
) -> None:
    model = {**TINY_MODEL, "options": {**TINY_MODEL["options"], "num_layers": 8}}
    train = {"steps": 2, "global_batch_size": 8, "validation_interval": 1}
    layout = {"dp_shard": 1, "pp": num_ranks, "schedule": schedule, "virtual_stages": virtual_stages}
    told = {"train": train, "run": {"timeout_s": 60}}
    piped = train_on_ranks(tiny_job(tmp_path, model=model, layout=layout, **told), tmp_path / "run", num_ranks)
    one = train_on_ranks(tiny_job(tmp_path, model=model, layout={"dp_shard": 1}, **told), tmp_path / "one", 1)
    losses = [[row["validation_loss"] for row in run.validation] for run in (piped, one)]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)


def _peers() -> list[int]:
    meshes = build_meshes(Layout(pp=2, dp_shard=2), "cpu")
    return dist.get_process_group_ranks(meshes.group("pp"))


def test_the_pipelines_of_a_job_are_side_by_side() -> None:
    assert run_ranks(_peers, 4) == [[0, 2], [1, 3], [0, 2], [1, 3]]
