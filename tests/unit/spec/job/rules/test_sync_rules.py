"""Keys of [replicas] for sums every few steps: each refusal names the field and a change that works."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec.job.job import Job

LOCAL = {"independent": True, "sync_every": 6}
REFUSED: list[tuple[dict[str, Any], dict[str, dict[str, Any]], str, str]] = [
    ({"sync_every": 6}, {}, "replicas.sync_every = 6 is for replicas", "replicas.independent to true"),
    ({**LOCAL, "fragments": 4}, {}, "no multiple of replicas.fragments = 4", "replicas.fragments to 1"),
    (
        {**LOCAL, "fragments": 2, "sync_delay_steps": 3},
        {},
        "replicas.sync_delay_steps = 3",
        "replicas.sync_delay_steps to 2",
    ),
    (LOCAL, {"checkpoint": {"interval": 50}}, "checkpoint.interval = 50", "checkpoint.interval to 48 or 54"),
    (LOCAL, {"checkpoint": {"interval": "auto"}}, 'checkpoint.interval = "auto" saves', "checkpoint.interval to 6"),
    (LOCAL, {"train": {"stop_after": 7}}, "train.stop_after = 7", "train.stop_after to 6 or 12"),
    (LOCAL, {"train": {"exact_elastic": True}}, "train.exact_elastic = true", "train.exact_elastic to false"),
    (LOCAL, {"guards": {"not_finite": "skip"}}, 'guards.not_finite = "skip"', 'guards.not_finite to "stop"'),
    (LOCAL, {"guards": {"spike_deviations": 6.0}}, "guards.spike_deviations = 6.0", "replicas.sync_every to 1"),
    ({"outer_learning_rate": 0.5}, {}, "has no effect with replicas.sync_every = 1", "outer_learning_rate to 0.7"),
    ({"outer_dtype": "bfloat16"}, {}, "has no effect with replicas.sync_every = 1", 'outer_dtype to "float32"'),
]


def job_of(replicas: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Job:
    return Job.from_dict(
        {
            "layout": {"dp_replicate": 2},
            "train": {"global_batch_size": 8, "steps": 60, **sections.get("train", {})},
            "checkpoint": {"interval": 12, **sections.get("checkpoint", {})},
            "guards": {"max_rollbacks": 0, **sections.get("guards", {})},
            "replicas": replicas,
        }
    )


@pytest.mark.parametrize(("replicas", "sections", "given", "fix"), REFUSED)
def test_what_cannot_be_is_refused_with_a_fix(
    replicas: dict[str, Any], sections: dict[str, dict[str, Any]], given: str, fix: str
) -> None:
    problems = [problem for problem in job_of(replicas, sections).problems() if given in problem]
    assert len(problems) == 1
    assert fix in problems[0]


@pytest.mark.parametrize(
    "replicas",
    [LOCAL, {**LOCAL, "fragments": 3, "sync_delay_steps": 1, "merge_factor": 0.5, "outer_dtype": "bfloat16"}],
)
def test_what_goes_together_is_accepted(replicas: dict[str, Any]) -> None:
    assert job_of(replicas, {}).problems() == []


def test_a_sync_is_due_when_any_fragment_is_and_in_the_last_step() -> None:
    replicas = job_of({**LOCAL, "fragments": 2}, {}).replicas
    assert [step for step in range(1, 15) if replicas.is_sync(step, 14)] == [3, 6, 9, 12, 14]
