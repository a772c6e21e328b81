"""Hypothesis strategies for jobs: every key takes any value that its rule allows."""

from typing import Any

from hypothesis import strategies as st

from meshwright.config.keys import SECTIONS, Key, job_keys
from meshwright.spec.job.job import Job
from meshwright.spec.job.mixture_source import MixtureSource
from meshwright.spec.job.sections import ParameterGroup

_texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
_plain = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=5,
)
_kinds: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "integer": st.integers(min_value=-1, max_value=2**70),
    "number": st.floats(min_value=0, allow_infinity=False) | st.floats(min_value=0, max_value=1),
    "string": _texts,
    "array": st.lists(st.floats(0, 1), min_size=2, max_size=2) | st.lists(st.integers(0, 2**70), max_size=3),
    "object": st.dictionaries(_texts, _plain, max_size=3),
}

_groups = st.builds(
    ParameterGroup,
    match=_texts.filter(bool),
    weight_decay=st.none() | st.floats(0, 1),
    learning_rate_ratio=st.floats(0, 2),
)

_tables = {
    "optimizer.groups": _groups,
    "data.mixture": st.builds(MixtureSource, source=_texts.filter(bool), weight=st.floats(0.01, 1)),
    "data.stage_steps": st.integers(1, 2**20),
    "adapter.targets": _texts.filter(bool),
}
"""What is in lists, of which a filter would leave the empty one alone."""


def values_of(key: Key) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of one key, None included where it may be left out."""
    values = st.sampled_from(key.choices) if key.choices else _kinds[key.kind].filter(key.accepts)
    if key.kind == "number" and not key.choices and not key.accepts(2.0):
        values = st.floats(0, 1).filter(key.accepts)
    if key.dotted == "checkpoint.niceness":
        values = st.integers(0, 19)  # a filter would reject nearly all integers
    if key.dotted in _tables:
        values = st.lists(_tables[key.dotted], max_size=2).map(tuple)
    if key.dotted == "layout.reshard_after_forward":
        values |= st.integers(1, 64)
    return st.none() | values if key.is_optional else values


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a job whose keys each are right; between them they need not be."""
    values: dict[str, Any] = {section: {} for section in SECTIONS}
    for key in job_keys().values():
        if key.section and draw(st.booleans()):
            values[key.section][key.name] = draw(values_of(key))
    layout = values["layout"]
    rest = [axis for axis, degree in layout.items() if degree == -1 and axis != "search"]
    for axis in rest[1:]:
        layout[axis] = 1
    return Job.model_validate(values)
