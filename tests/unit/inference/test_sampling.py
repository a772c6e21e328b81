"""Sampling: which tokens can be drawn, and how often."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.inference.generate import Sampling

PROBABILITIES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def kept(sampling: Sampling) -> list[int]:
    return sampling.probabilities(PROBABILITIES.log()).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), [0, 1, 2, 3]),
        (Sampling(temperature=1, top_k=2), [1, 3]),
        (Sampling(temperature=1, top_k=9), [0, 1, 2, 3]),
        (Sampling(temperature=1, top_p=0.39), [1]),
        (Sampling(temperature=1, top_p=0.41), [1, 3]),
        (Sampling(temperature=1, top_p=0.71), [1, 2, 3]),
        (Sampling(temperature=1, top_p=1e-9), [1]),
        (Sampling(temperature=1, top_k=3, top_p=0.5), [1, 3]),
    ],
)
def test_the_likeliest_are_kept(sampling: Sampling, expected: list[int]) -> None:
    assert kept(sampling) == expected


def test_what_is_kept_keeps_its_proportions() -> None:
    found = Sampling(temperature=1, top_k=2).probabilities(PROBABILITIES.log())
    torch.testing.assert_close(found, torch.tensor([0, 4 / 7, 0, 3 / 7]))
    found = Sampling(temperature=0.5).probabilities(PROBABILITIES.log())
    torch.testing.assert_close(found, PROBABILITIES**2 / (PROBABILITIES**2).sum())


def test_draws_have_the_frequencies_of_the_model() -> None:
    sampling = Sampling(temperature=1)
    generator = sampling.generator()
    drawn = torch.tensor([sampling.draw(PROBABILITIES.log(), generator) for _ in range(4000)])
    torch.testing.assert_close(drawn.bincount() / 4000, PROBABILITIES, rtol=0, atol=0.03)


@given(
    st.lists(st.integers(-240, 240), min_size=1, max_size=40),
    st.floats(0.05, 5),
    st.none() | st.integers(1, 50),
    st.floats(0.01, 1),
)
def test_any_settings_give_a_distribution_that_holds_the_likeliest(
    eighths: list[int], temperature: float, top_k: int | None, top_p: float
) -> None:
    logits_V = torch.tensor(eighths) / 8
    found = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(logits_V)
    assert found.isfinite().all()
    assert found.sum() == pytest.approx(1, abs=1e-5)
    assert found.max() == found[logits_V == logits_V.max()].max()
    assert (found > 0).sum() <= (top_k or logits_V.numel())


def test_temperature_zero_draws_nothing() -> None:
    sampling = Sampling(temperature=0)
    generator = sampling.generator()
    before = generator.get_state()
    assert sampling.draw(PROBABILITIES.log(), generator) == 1
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"--temperature -1\.0 must be 0"),
        ({"top_k": 0}, "--top-k 0 must be 1 or more"),
        ({"top_p": 0.0}, r"--top-p 0\.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, r"--top-p 1\.5 must be above 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0 must be 1 or more"),
        ({"temperature": float("nan")}, "--temperature nan must be"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]
