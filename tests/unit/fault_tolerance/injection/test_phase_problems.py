"""Faults in validations are refused where no such validation comes, and only there."""

import re

import pytest

from meshwright.fault_tolerance.injection.phase_problems import phase_problems
from meshwright.spec.fault import Fault, FaultKind
from meshwright.spec.job.job import Job

QUESTIONS = {"source": "questions.jsonl", "interval": 0}


@pytest.mark.parametrize(
    ("kind", "step", "interval", "what"),
    [
        ("crash", 5, 0, "with train.validation_interval = 0 no step has one"),
        ("hang", None, 9, "with train.validation_interval = 9 no step has one"),
        ("crash", 5, 4, "of step 5, which has none, with train.validation_interval = 4: use a step .* such as 4,"),
        ("truncate", 9, 4, "of step 9, which has none"),
    ],
)
def test_a_validation_that_never_comes_is_refused(kind: FaultKind, step: int | None, interval: int, what: str) -> None:
    job = Job.from_dict({"train": {"steps": 8, "validation_interval": interval}})
    faults = [Fault(kind="crash", rank=0, step=5), Fault(kind=kind, rank=0, step=step, phase="validation")]
    (problem,) = phase_problems(faults, job)
    assert re.match(rf'fault 2 \({kind}\): phase = "validation".* {what}', problem)


@pytest.mark.parametrize(
    ("kind", "step", "job"),
    [
        ("crash", 4, {"train": {"steps": 8, "validation_interval": 4}}),
        ("crash", None, {"train": {"steps": 8, "validation_interval": 4}}),
        ("truncate", 5, {"train": {"steps": 8, "validation_interval": 4}}),
        ("crash", 8, {"train": {"steps": 8}, "evaluation": QUESTIONS}),
        ("crash", 6, {"train": {"steps": 8}, "evaluation": QUESTIONS | {"interval": 3}}),
    ],
)
def test_a_validation_that_comes_is_not(kind: FaultKind, step: int | None, job: dict[str, object]) -> None:
    assert not phase_problems([Fault(kind=kind, rank=0, step=step, phase="validation")], Job.from_dict(job))
