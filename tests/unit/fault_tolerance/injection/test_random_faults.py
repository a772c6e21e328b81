"""Random faults are valid, spread over the run, and those of their seed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.fault_tolerance.injection.random_faults import random_faults
from meshwright.fault_tolerance.storage.storage_problems import storage_problems
from meshwright.spec.fault import INJECTED, NUMBER_FAULTS, injection_problems
from meshwright.spec.job.job import Job
from meshwright.spec.storage_fault import DAMAGES, DISK_FAULTS


def job_of(num_steps: int, **checkpoint: int) -> Job:
    return Job.from_dict({"train": {"steps": num_steps}, "checkpoint": {"interval": 3, **checkpoint}})


@given(num_faults=st.integers(1, 60), spare=st.integers(1, 40), seed=st.integers(0, 9), num_ranks=st.integers(1, 8))
def test_a_schedule_can_be_injected(num_faults: int, spare: int, seed: int, num_ranks: int) -> None:
    num_steps = num_faults + spare
    job = job_of(num_steps)
    faults = random_faults(num_faults, seed, job=job, num_ranks=num_ranks)
    assert len(faults) == num_faults
    assert not injection_problems(faults, num_ranks, num_steps)
    assert not storage_problems(faults, job, num_ranks)
    assert faults == random_faults(num_faults, seed, job=job, num_ranks=num_ranks)
    steps = [fault.step for fault in faults if fault.phase != "restore"]
    assert steps == sorted(set(steps))
    for before, fault in pairwise(faults):
        if fault.phase == "restore":
            assert before.kind != "slow-rank"
            assert not before.is_of_disk
            assert fault.step == before.step - 1


def test_many_faults_are_of_every_kind_and_of_every_rank() -> None:
    faults = random_faults(300, 1, job=job_of(400), num_ranks=3)
    assert {fault.kind for fault in faults} == set(INJECTED) - set(NUMBER_FAULTS)
    assert {fault.rank for fault in faults} == {0, 1, 2}
    assert any(fault.phase == "restore" for fault in faults)
    assert all(fault.step > 6 for fault in faults if fault.kind in DAMAGES and fault.phase != "restore")


@pytest.mark.parametrize(
    ("checkpoint", "left_out"), [({"interval": 0}, (*DAMAGES, *DISK_FAULTS)), ({"keep": 1}, DAMAGES)]
)
def test_storage_is_left_alone_where_a_run_could_not_go_on(
    checkpoint: dict[str, int], left_out: tuple[str, ...]
) -> None:
    faults = random_faults(300, 1, job=job_of(400, **checkpoint), num_ranks=3)
    assert {fault.kind for fault in faults} == {*INJECTED} - {*NUMBER_FAULTS} - {*left_out}


def test_more_faults_than_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"10 random faults in 10 steps.*set train\.steps to 11 or more"):
        random_faults(10, 0, job=job_of(10), num_ranks=2)
