"""Random numbers of a microbatch come from its place in the run, whichever generator draws them."""

import random

import numpy as np
import pytest
import torch

from meshwright.trainer.step.train_step import seed_everything


def draw(seed: int, step: int, first_slot: int) -> tuple[float, float, float]:
    seed_everything(seed, step, first_slot)
    return torch.rand(()).item(), float(np.random.random()), random.random()


def test_the_same_place_draws_the_same_numbers() -> None:
    assert draw(0, 3, 8) == draw(0, 3, 8)


@pytest.mark.parametrize("place", [(1, 3, 8), (0, 4, 8), (0, 3, 9)], ids=str)
def test_another_place_draws_other_numbers(place: tuple[int, int, int]) -> None:
    assert not set(draw(0, 3, 8)) & set(draw(*place))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_in_use_is_seeded_too() -> None:
    torch.cuda.init()
    seed_everything(0, 3, 8)
    first = torch.rand((), device="cuda").item()
    seed_everything(0, 3, 8)
    assert torch.rand((), device="cuda").item() == first
