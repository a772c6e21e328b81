"""A requested layout becomes a concrete one, or says which numbers would do."""

import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.errors import InfeasibleLayout
from meshwright.spec.layout.layout import AXES, Layout, LayoutRequest
from meshwright.units import nearest_multiples

degrees = st.fixed_dictionaries({axis: st.integers(1, 6) for axis in AXES})


@pytest.mark.parametrize(
    ("word", "value"), [("none", False), ("blocks", True), (True, True), ("model", "model"), ("auto", "auto")]
)
def test_compile_has_a_name_for_each_choice(word: object, value: object) -> None:
    assert Layout.from_dict({"compile": word}).compile == value
    # The value of true and false is what earlier versions wrote.
    assert LayoutRequest.from_dict({"compile": word}).to_dict()["compile"] == value


@pytest.mark.parametrize("word", ["graph", "yes", 1])
def test_compile_takes_no_other_word(word: object) -> None:
    with pytest.raises(ValidationError):
        Layout.from_dict({"compile": word})


@given(degrees, st.sampled_from(AXES), st.integers(1, 50))
def test_the_rest_takes_what_the_others_leave(fixed: dict[str, int], rest: str, degree: int) -> None:
    request = LayoutRequest(**{**fixed, rest: -1})
    num_ranks = math.prod(fixed.values()) // fixed[rest] * degree
    layout = request.resolve(num_ranks)
    assert layout.num_ranks == num_ranks
    assert getattr(layout, rest) == degree
    assert all(getattr(layout, axis) == fixed[axis] for axis in AXES if axis != rest)
    assert type(layout) is Layout


def test_every_nth_block_is_counted_from_the_first_of_a_stage() -> None:
    layout = Layout(pp=2, activation_checkpoint="full", activation_checkpoint_every=2)
    first, second = ([layout.checkpoint_of(block, stage[0]) for block in stage] for stage in (range(3), range(3, 6)))
    assert first == second == ["full", "none", "full"]


@given(degrees, st.sampled_from(AXES), st.integers(1, 5000))
def test_ranks_that_do_not_divide_name_the_nearest_that_do(fixed: dict[str, int], rest: str, num_ranks: int) -> None:
    request = LayoutRequest(**{**fixed, rest: -1})
    assume(num_ranks % request.num_fixed_ranks)
    with pytest.raises(InfeasibleLayout) as caught:
        request.resolve(num_ranks)
    advice = re.search(r"start ([0-9 or]+) ranks", str(caught.value))
    assert advice is not None
    choices = [int(choice) for choice in advice[1].split(" or ")]
    assert all(getattr(request.resolve(choice), rest) >= 1 for choice in choices)
    assert all(abs(choice - num_ranks) < request.num_fixed_ranks for choice in choices)
    assert len(choices) == len(set(choices)) == (2 if num_ranks > request.num_fixed_ranks else 1)


@given(degrees, st.integers(1, 5000))
def test_without_a_rest_exactly_the_product_is_right(fixed: dict[str, int], num_ranks: int) -> None:
    request = LayoutRequest(**fixed)
    product = math.prod(fixed.values())
    assert request.resolve(product).num_ranks == product
    assume(num_ranks != product)
    with pytest.raises(InfeasibleLayout, match=rf"start {product} ranks?, or set one degree in \[layout\] to -1"):
        request.resolve(num_ranks)


@given(degrees, st.integers(1, 8), st.sampled_from(["none", "selective", "full"]), st.booleans())
def test_choices_travel_and_json_comes_back(
    fixed: dict[str, int], microbatch_size: int, policy: str, is_compiled: bool
) -> None:
    request = LayoutRequest.from_dict(
        {**fixed, "microbatch_size": microbatch_size, "activation_checkpoint": policy, "compile": is_compiled}
    )
    layout = request.resolve(request.num_ranks)
    assert (layout.microbatch_size, layout.activation_checkpoint, layout.compile) == (
        microbatch_size,
        policy,
        is_compiled,
    )
    assert Layout.from_json(layout.to_json()) == layout
    assert LayoutRequest.from_json(request.to_json()) == request
    assert layout.dp == layout.dp_replicate * layout.dp_shard


def test_golden_messages() -> None:
    messages = {
        (12, "dp_shard=-1 tp=8"): "12 ranks do not divide by tp=8, so layout.dp_shard = -1 has no value: "
        "start 8 or 16 ranks, or change a degree in [layout]",
        (3, "dp_shard=-1 pp=2 tp=4"): "3 ranks do not divide by pp=2 x tp=4 = 8, so layout.dp_shard = -1 has no value: "
        "start 8 ranks, or change a degree in [layout]",
        (3, "dp_shard=4"): "3 ranks cannot run a layout of dp_shard=4: "
        "start 4 ranks, or set one degree in [layout] to -1, which takes the ranks that the others leave",
        (2, "dp_shard=1"): "2 ranks cannot run a layout of one rank: "
        "start 1 rank, or set one degree in [layout] to -1, which takes the ranks that the others leave",
        (3, "tp=2"): "3 ranks do not divide by tp=2, so layout.dp_shard has no value: "
        "start 2 or 4 ranks, or change a degree in [layout]",
        (0, "dp_shard=-1"): "0 ranks cannot run a layout: start 1 or more ranks",
    }
    for (num_ranks, text), message in messages.items():
        pairs = (pair.split("=") for pair in text.split())
        request = LayoutRequest.from_dict({axis: int(degree) for axis, degree in pairs})
        with pytest.raises(InfeasibleLayout) as caught:
            request.resolve(num_ranks)
        assert str(caught.value) == message


def test_a_dp_shard_that_is_left_out_takes_the_rest_of_a_given_number() -> None:
    assert LayoutRequest().resolve(1) == Layout()
    assert LayoutRequest().resolve(4) == Layout(dp_shard=4)
    assert LayoutRequest(tp=2).resolve(8) == Layout(tp=2, dp_shard=4)
    assert LayoutRequest(tp=-1).resolve(8) == Layout(tp=8)
    assert LayoutRequest(tp=2).num_ranks == 2


@pytest.mark.parametrize("degree", [0, -2, 1.0, True, "2"])
def test_what_is_no_degree(degree: object) -> None:
    with pytest.raises(ValidationError):
        LayoutRequest.from_dict({"tp": degree})


def test_only_one_degree_is_the_rest() -> None:
    with pytest.raises(ValidationError, match=r"layout\.pp = -1 and layout\.tp = -1 both ask for the rest"):
        LayoutRequest(pp=-1, tp=-1)


def test_a_concrete_layout_has_no_rest() -> None:
    with pytest.raises(ValidationError):
        Layout(tp=-1)


@pytest.mark.slow
@given(st.integers(1, 500), st.integers(2, 50))
def test_nearest_multiples_enclose_the_value(value: int, divisor: int) -> None:
    assume(value % divisor)
    nearest = nearest_multiples(value, divisor)
    assert all(multiple % divisor == 0 and multiple > 0 for multiple in nearest)
    assert nearest[-1] - value < divisor
    assert nearest[0] < value or len(nearest) == 1


@pytest.mark.parametrize(
    ("layout", "is_each"),
    [
        (Layout(dp_shard=2), True),
        (Layout(dp_replicate=2, cp=2), True),
        (Layout(), False),
        (Layout(dp_replicate=2, tp=2), False),
        (Layout(dp_shard=2, pp=2), False),
        (Layout(dp_shard=2, gradient_sync="step"), False),
        (Layout(dp_shard=2, pp=2, gradient_sync="microbatch"), True),
        (Layout(gradient_sync="microbatch"), True),
    ],
)
def test_gradients_are_reduced_for_each_microbatch_where_sharding_frees_them(layout: Layout, is_each: bool) -> None:
    assert layout.reduces_each_microbatch == is_each


@pytest.mark.parametrize("keys", [{}, {"tp": 2}, {"dp_shard": 1}, {"tp": -1}])
def test_a_dp_shard_that_was_left_out_stays_so(keys: dict[str, int]) -> None:
    request = LayoutRequest(**keys)
    for copied in (
        LayoutRequest.from_json(request.to_json()),
        LayoutRequest.model_validate(request.model_dump()),
        request.replace(compile=True),
    ):
        assert copied.is_open == request.is_open
        assert copied.dp_shard == request.dp_shard
