import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshwright.data.streams.stream_state import decoded, encoded
from meshwright.errors import DataError

KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | hnp.arrays(st.sampled_from(["<i8", "<f4", "|u1", "|b1", "<U3", "<c8"]), hnp.array_shapes(min_dims=0, min_side=0))
)
STATES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.fixed_dictionaries({"type": inner, "value": inner})
    ),
    max_leaves=10,
)


def same(one: Any, other: Any) -> bool:
    """Compare with types: True is not 1, and a tuple no list."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


@given(STATES)
def test_a_state_is_the_same_after_json(state: Any) -> None:
    assert same(decoded(json.loads(json.dumps(encoded(state)))), state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.get_rng_state(),
        torch.randn(2, 3).bfloat16(),
        torch.zeros(0, 4, dtype=torch.int32),
        torch.tensor(True),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([1 + 2j]),
    ],
)
def test_tensors_are_the_same_after_json(tensor: torch.Tensor) -> None:
    found = decoded(json.loads(json.dumps(encoded({"rng": tensor}))))["rng"]
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_numbers_of_numpy_are_kept() -> None:
    found = decoded(json.loads(json.dumps(encoded({"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)}))))
    assert found == {"a": 3, "b": 0.5, "c": True}
    assert isinstance(found["a"], np.int64)


def test_a_state_is_a_copy() -> None:
    places = [1, 2]
    saved = encoded({"places": places})
    places.append(3)
    assert saved == {"places": [1, 2]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0, {"b": object()}]}, r"state_dict\(\)\['a'\]\[1\]\['b'\] .* is a object, which a checkpoint cannot"),
        ({"a": np.array([None])}, r"state_dict\(\)\['a'\] .* array of Python objects"),
        ({"a": {1, 2}}, r"is a set"),
    ],
)
def test_what_cannot_be_saved_is_named(state: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encoded(state)
