"""What is contradictory in the sources of [data]: the tables of a mixture, their weights and stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from meshwright.spec.job.mixture_source import MAX_TOTAL_WEIGHT, whole_weights
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.problem import Problem, shown_value
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.spec.job.sections import DataSection

_SOURCE: Final = "data.source"
_MIXTURE: Final = "data.mixture"
_STAGES: Final = "data.stage_steps"
_DEFAULT_WEIGHT: Final = 1.0


def mixture_problems(data: DataSection) -> Iterator[Problem]:
    """Yield what is contradictory in [data], whatever the model is."""
    if not data.mixture:
        yield from _without_mixture(data)
        return
    if data.source != type(data)().source:
        tables = counted(len(data.mixture), "table")
        what = f"{_SOURCE} = {shown_value(data.source)} and {_MIXTURE} of {tables} are both given"
        yield Problem(what, [{_SOURCE: None}, {_MIXTURE: None}])
    if list(data.stage_steps) != sorted(set(data.stage_steps)):
        what = f"{_STAGES} = {list(data.stage_steps)} must rise from stage to stage"
        yield Problem(what, [{_STAGES: sorted(set(data.stage_steps))}])
    found = [*_table_problems(data)]
    yield from found
    if not found:
        yield from _weight_problems(data)


def _without_mixture(data: DataSection) -> Iterator[Problem]:
    if data.stage_steps:
        what = f"{_STAGES} = {list(data.stage_steps)} changes the weights of {_MIXTURE}, which has no table"
        yield Problem(what, [{_STAGES: []}])
    if data.deduplicate and is_object_source(data.source):
        what = f"data.deduplicate = true compares documents, and {_SOURCE} = {shown_value(data.source)} has samples"
        yield Problem(what, [{"data.deduplicate": False}])


def _table_problems(data: DataSection) -> Iterator[Problem]:
    """Yield what is wrong with single tables and with their names."""
    num_stages = len(data.stage_steps) + 1
    for number, table in enumerate(data.mixture, start=1):
        where = f"{_MIXTURE}, table {number} ({table.label})"
        if is_object_source(table.source):
            what = f"{where}: source = {shown_value(table.source)} is a class of your own, which cannot be mixed"
            yield Problem(what, otherwise=f"name files, or set {_SOURCE} to it alone")
        if table.weights and table.weight != _DEFAULT_WEIGHT:
            yield Problem(f"{where}: weight and weights are both given", otherwise="keep one of them")
        elif table.weights and len(table.weights) != num_stages:
            what = f"{where}: weights has {counted(len(table.weights), 'number')} for {counted(num_stages, 'stage')}"
            yield Problem(what, otherwise=f"give one for each stage; {_STAGES} has the last step of all but the last")
        elif not any(table.weights_of(num_stages)):
            yield Problem(f"{where}: no weight is above 0", otherwise="give it one, or leave the table out")
    for label, number in Counter(table.label for table in data.mixture).items():
        if number > 1:
            what = f"{_MIXTURE}: {number} tables have the name {shown_value(label)}"
            yield Problem(what, otherwise="give each table a name of its own")


def _weight_problems(data: DataSection) -> Iterator[Problem]:
    """Yield what is wrong with the weights of a stage together."""
    for stage, weights in enumerate(stage_weights(data)):
        if not any(weights):
            yield Problem(f"{_MIXTURE}: no weight is above 0 in stage {stage + 1}", otherwise="give one of them one")
        elif sum(whole_weights(weights)) >= MAX_TOTAL_WEIGHT:
            what = f"{_MIXTURE}: the weights {list(weights)} have no common unit in which they sum to less than 2^31"
            yield Problem(what, otherwise="write them with fewer digits")


def stage_weights(data: DataSection) -> list[tuple[float, ...]]:
    """Return the weights of all tables in each stage."""
    num_stages = len(data.stage_steps) + 1
    return [*zip(*(table.weights_of(num_stages) for table in data.mixture), strict=True)]
