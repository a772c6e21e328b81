"""Samples of a user's own that a built-in model cannot take are one error that names the sample."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from meshwright.data.dataset import build_dataset
from meshwright.data.examine.sample_limits import SampleLimits, sample_limits
from meshwright.data.open_loader import open_loader
from meshwright.data.order import Share
from meshwright.errors import DataError
from meshwright.spec.job.job import Job
from training_runs import TINY_MODEL

LIMITS = SampleLimits("mine:Data", seq_len=4, vocab_size=10)


def tokens(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([[1, 2, 3, 4], list(values)], dtype=dtype)


GOOD = tokens(0, 9, 0, 9)


@pytest.mark.parametrize(
    ("inputs", "targets", "problem"),
    [
        (
            GOOD.float(),
            GOOD,
            r"inputs of sample 7 of data.source = 'mine:Data' are float32 \[4\], .* int64 or int32 \[4\]",
        ),
        (GOOD, GOOD.int(), r"targets of sample 7 .* are int32 \[4\], and the model takes tokens, int64 \[4\]"),
        (GOOD[:, :3], GOOD, r"inputs of sample 7 .* are int64 \[3\]"),
        (GOOD, GOOD[..., None], r"targets of sample 7 .* are int64 \[4, 1\]"),
        (tokens(0, 10, 0, 0), GOOD, r"inputs of sample 8 .* hold 10 at place 1, and the model's tokens are 0 to 9"),
        (tokens(0, 0, -100, 0), GOOD, r"inputs of sample 8 .* hold -100 at place 2"),
        (GOOD, tokens(0, 0, 0, -1), r"targets of sample 8 .* hold -1 at place 3"),
    ],
)
def test_what_the_model_cannot_take_is_named(inputs: torch.Tensor, targets: torch.Tensor, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        LIMITS.require(inputs, targets, range(7, 9))


@given(arrays(np.int64, (3, 4), elements=st.integers(-1, 10) | st.just(-100)))
def test_exactly_the_tokens_of_the_model_are_taken(values: np.ndarray) -> None:
    is_token, found = (values >= 0) & (values < 10), torch.from_numpy(values)
    for inputs, targets, is_good in (
        (found, torch.zeros(3, 4, dtype=torch.int64), is_token),
        (torch.zeros(3, 4, dtype=torch.int32), found, is_token | (values == -100)),
    ):
        if is_good.all():
            LIMITS.require(inputs, targets, range(3))
            continue
        with pytest.raises(DataError, match=f"of sample {np.argwhere(~is_good)[0][0]} "):
            LIMITS.require(inputs, targets, range(3))


@pytest.mark.parametrize("source", ["Numbered", "generated"])
def test_every_loader_of_a_users_samples_compares_them(source: str) -> None:
    sections = {"train": {"seq_len": 31}, "data": {"source": f"sample_sources:{source}", "validation_fraction": 0}}
    job = Job.from_dict({"model": TINY_MODEL, **sections})
    reader = open_loader(build_dataset(job.data, 31), Share(4), job)
    with pytest.raises(DataError, match=r"are int64 \[32\], and the model takes tokens, int64 or int32 \[31\]"):
        reader.microbatches(0)
    reader.close()


def test_a_users_model_and_texts_have_no_limits() -> None:
    own = Job.from_dict({"model": {"source": "mine:Model"}, "data": {"source": "mine:Data"}})
    assert sample_limits(own) is None
    assert sample_limits(Job.from_dict({"model": TINY_MODEL})) is None
