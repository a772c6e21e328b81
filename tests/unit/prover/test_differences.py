"""Rounding passes and mistakes do not, however small the parameter that they are in."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.prover.differences import TOLERANCES, Incomparable, Tensors, Tolerances, WholeRecord, compare


def tensors(seed: int, scales: dict[str, float]) -> Tensors:
    generator = np.random.default_rng(seed)
    return {name: (scale * generator.normal(size=(8, 8))).astype(np.float32) for name, scale in scales.items()}


SCALES = {"large": 1.0, "small": 1e-2, "tiny": 1e-7}
START = tensors(0, dict.fromkeys(SCALES, 1.0))


def run(gradients: Tensors, end: Tensors | None = None, loss: float = 2.0, norm: float = 8.0) -> WholeRecord:
    if end is None:
        end = {name: START[name] - 0.01 * gradient for name, gradient in gradients.items()}
    return WholeRecord(START, [loss], [norm], [gradients], end, [])


GRADIENTS = tensors(1, SCALES)
REFERENCE = run(GRADIENTS)


def changed(name: str, factor: float) -> Tensors:
    return {**GRADIENTS, name: (GRADIENTS[name] * factor).astype(np.float32)}


def test_the_same_run_differs_by_nothing() -> None:
    differences = compare(REFERENCE, REFERENCE, TOLERANCES["float64"])
    assert [(one.kind, one.relative, one.share) for one in differences] == [
        ("loss", 0.0, 0.0),
        ("gradient", 0.0, 0.0),
        ("weight", 0.0, 0.0),
    ]


@given(st.sampled_from(["large", "small"]), st.floats(1e-7, 1.0))
def test_a_gradient_is_compared_with_its_own_size(name: str, error: float) -> None:
    record = run(changed(name, 1 + error), REFERENCE.weights)
    _, gradient, weight = compare(record, REFERENCE, TOLERANCES["float32"])
    assert weight.relative == 0
    assert gradient.relative == pytest.approx(error, rel=0.1, abs=2e-7)
    if error > 2e-7:
        assert gradient.name == name


def test_noise_in_a_gradient_that_is_nearly_nothing_is_no_mistake() -> None:
    # A ten-millionth of the others: rounding of what cancels in it is as large as it is.
    _, gradient, _ = compare(run(changed("tiny", -1), REFERENCE.weights), REFERENCE, Tolerances(2e-6, 1e-3, 1e-3))
    assert gradient.share < 1
    # But a mistake of the size of a typical gradient is one, wherever it is.
    _, gradient, _ = compare(run(changed("tiny", 1e4), REFERENCE.weights), REFERENCE, TOLERANCES["float32"])
    assert (gradient.name, gradient.share > 1) == ("tiny", True)


def test_the_norm_that_clips_is_compared_too() -> None:
    _, gradient, _ = compare(run(GRADIENTS, norm=8.1), REFERENCE, TOLERANCES["float32"])
    assert (gradient.name, gradient.relative) == ("all", pytest.approx(0.1 / 8))


def test_an_update_that_was_not_made_is_seen_beside_large_weights() -> None:
    end = {**REFERENCE.weights, "small": START["small"]}
    _, _, weight = compare(run(GRADIENTS, end), REFERENCE, TOLERANCES["float32"])
    assert (weight.name, weight.share > 1) == ("small", True)


def test_the_rounding_of_a_weight_that_hardly_moved_is_no_mistake() -> None:
    # One step, of 1e-5 of the weight's own size: the weight cannot say it more finely than to 1e-7.
    moved = {name: START[name] + np.float32(1e-5) for name in SCALES}
    rounded = {**moved, "small": np.nextafter(moved["small"], np.float32(math.inf))}
    _, _, weight = compare(run(GRADIENTS, rounded), run(GRADIENTS, moved), TOLERANCES["float32"])
    assert 0 < weight.relative <= weight.bar


def test_the_worst_is_measured_against_its_bar() -> None:
    loss, _, _ = compare(run(GRADIENTS, loss=2.0 * (1 + 1e-5)), REFERENCE, TOLERANCES["float32"])
    assert (loss.relative, loss.share > 1) == (pytest.approx(1e-5, rel=1e-3), True)


def test_initial_weights_must_be_equal_to_the_bit() -> None:
    other = {**START, "small": np.nextafter(START["small"], np.float32(1))}
    record = WholeRecord(other, [2.0], [8.0], [GRADIENTS], REFERENCE.weights, [])
    with pytest.raises(Incomparable, match="initial weight small is not that of one process"):
        compare(record, REFERENCE, TOLERANCES["float32"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["large", "small"], "no rank holds tiny"),
        (["large", "small", "tiny", "other"], "one process has no other"),
    ],
)
def test_other_parameters_than_those_of_one_process_are_told(names: list[str], message: str) -> None:
    gradients = {name: GRADIENTS.get(name, GRADIENTS["large"]) for name in names}
    with pytest.raises(Incomparable, match=message):
        compare(run(gradients, REFERENCE.weights), REFERENCE, TOLERANCES["float32"])
