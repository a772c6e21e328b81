"""The model and the data that every way trains; Meshwright takes them as model.source and data.source."""

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WIDTH = 64
SAMPLES_PER_RANK = 4
LEARNING_RATE = 1e-3


class Numbers:
    """Sample i is a function of i."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        values = np.random.default_rng(index).standard_normal(WIDTH).astype(np.float32)
        return values, np.roll(values, 1)


class Network(nn.Module):
    """Two layers, and a pause, since a step that takes no time can lose none."""

    def __init__(self, pause_s: float = 0.1) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return each sample turned by one place, once trained."""
        time.sleep(self.pause_s)
        turned: Tensor = self.down(F.gelu(self.up(x)))
        return turned

    def loss(self, found: Tensor, expected: Tensor) -> Tensor:
        """Return the mean square error."""
        return F.mse_loss(found, expected)


def batch(step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a rank in a step, counted from 1."""
    first = ((step - 1) * num_ranks + rank) * SAMPLES_PER_RANK
    data = Numbers()
    inputs, targets = zip(*(data[first + number] for number in range(SAMPLES_PER_RANK)), strict=True)
    return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the whole of a sharded parameter; a collective."""
    assert isinstance(parameter, DTensor)
    whole: Tensor = parameter.full_tensor()
    return whole


def new_network() -> Network:
    """Return the same network in every process."""
    torch.manual_seed(0)
    return Network()
