"""Traces of all ranks are all there, and each is of the rank that it is given for."""

import numpy as np
import pytest

from meshwright.errors import ConfigError
from meshwright.spec.trace.trace import Records, Storages, Trace, Traced, Uses
from meshwright.spec.trace.traces import Traces

EMPTY = np.zeros(0, np.int64)


def trace_of(rank: int, world_size: int) -> Trace:
    return Trace(
        traced=Traced(build="module:function", rank=rank, world_size=world_size, torch_version="2.13.0"),
        signatures=(),
        scopes=(),
        phases=(),
        actions=(),
        groups=(),
        group_names=(),
        records=Records(**dict.fromkeys(Records.__dataclass_fields__, EMPTY)),
        storages=Storages(**dict.fromkeys(Storages.__dataclass_fields__, EMPTY)),
        uses=Uses(**dict.fromkeys(Uses.__dataclass_fields__, EMPTY)),
    )


def test_a_rank_does_what_its_representative_does() -> None:
    traces = Traces(4, {0: trace_of(0, 4), 2: trace_of(2, 4)}, np.array([0, 0, 2, 2]))
    assert traces.of_rank(1) is traces.traces[0]
    assert traces.of_rank(2) is traces.of_rank(3) is traces.traces[2]


def test_where_every_rank_was_traced_each_stands_for_itself() -> None:
    traces = Traces.all_of({1: trace_of(1, 2), 0: trace_of(0, 2)})
    assert traces.class_of_rank.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ranks", "classes", "message"),
    [
        ([0], [0], "1 ranks have a class but the job has world_size = 4"),
        ([0], [0, 0, 2, 2], "ranks 2 represent a class but have no trace"),
        ([0, 1], [0, 0, 0, 0], "ranks 1 have a trace but are not the representatives"),
    ],
)
def test_traces_that_are_not_those_of_a_job_are_refused(ranks: list[int], classes: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Traces(4, {rank: trace_of(rank, 4) for rank in ranks}, np.array(classes))


def test_a_trace_of_another_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="given for rank 0 of 4 is of rank 1 of 4"):
        Traces(4, {0: trace_of(1, 4)}, np.zeros(4, np.int64))
