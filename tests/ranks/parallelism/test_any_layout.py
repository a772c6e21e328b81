"""Valid means trains: whatever layout of whatever model is not refused by name gives what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.spec.job.validity import layout_problems
from meshwright.spec.layout.layout_text import layout_text
from random_layouts import Case, cases, train_both

pytestmark = DYNAMO_WARNINGS

FEW: dict[str, Any] = {
    "deadline": None,
    "database": None,
    # Each example takes seconds, and so would each step towards a smaller one.
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sums")


def check(case: Case, folder: Path, *, repeat: bool) -> None:
    job, layout = case
    if problems := layout_problems(job, layout):
        assert all(text.startswith(("layout.", "train.", "model.")) for text in problems), problems
        return
    proof = train_both(job, layout, folder, repeat=repeat)
    said = f"{layout_text(layout)}, {job.model.source} {job.model.options}, {job.train}"
    assert proof.holds, (said, proof.problem, proof.worst, proof.repeats)


@pytest.mark.long
@settings(max_examples=2, derandomize=True, **FEW)
@given(cases())
def test_a_layout_that_is_not_refused_trains_as_one_process(folder: Path, case: Case) -> None:
    check(case, folder, repeat=False)


# `pytest --hypothesis-seed=N` draws others.
@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=60, **FEW)
@given(cases())
def test_many_layouts_train_as_one_process_and_again(folder: Path, case: Case) -> None:
    check(case, folder, repeat=True)
