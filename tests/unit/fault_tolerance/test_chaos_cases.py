"""The faults of the chaos matrix can be injected, and cover every kind; what peers record is read as ours."""

import json
from pathlib import Path

import pytest

from benchmarks.recovery.ranks.record import RUN, Record
from benchmarks.recovery.ranks.workload import batch
from meshwright.fault_tolerance.step_ledger import read_ledger
from meshwright.fault_tolerance.storage.storage_problems import storage_problems
from meshwright.spec.fault import injection_problems
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from validation.chaos_cases import KINDS, LAYOUTS, num_steps_of, planned_faults

JOB = Job.from_dict({"checkpoint": {"interval": 3}})


@pytest.mark.parametrize("every", [1, 3])
def test_planned_faults_can_be_injected_and_are_of_every_kind(every: int) -> None:
    kinds = set()
    for number, layout in enumerate(LAYOUTS):
        faults = planned_faults(number, layout.num_ranks, every)
        assert not injection_problems(faults, layout.num_ranks, num_steps_of(faults))
        assert not storage_problems(faults, JOB, layout.num_ranks)
        assert {0, layout.num_ranks - 1} == {fault.rank for fault in faults}
        kinds |= {fault.kind for fault in faults}
    assert kinds == {*KINDS}


def test_a_peer_records_what_the_ledger_of_ours_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN, str(tmp_path))
    (tmp_path / "kills.json").write_text("[[1, 3]]", encoding="utf-8")
    record = Record(1)
    for step in (1, 2):
        record.step(step, [batch(step, 1, 2)[0]])
    entries = read_ledger(Run(tmp_path).ledger(1))
    assert [entry.step for entry in entries] == [1, 2]
    assert entries[0].samples != entries[1].samples
    assert [record.is_to_die(step) for step in (1, 2, 3)] == [False, False, True]
    assert not Record(0).is_to_die(3)
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(number))
    record.maybe_die(3)
    assert killed == [9]
    assert json.loads(Run(tmp_path).injected_fault(0).read_text(encoding="utf-8"))["step"] == 3
    assert not record.is_to_die(3)
