"""Tokens and optimizer of one rank, as the task says; needs numpy and torch only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tokens = np.ndarray[Any, Any]


def all_rows(folder: Path) -> Tokens:
    """Return the sequences of all steps and ranks in order, [sequences, seq_len + 1]: a loader's shares are ours."""
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    return np.asarray(tokens.reshape(-1, tokens.shape[-1]))


def rows_of_rank(folder: Path, task: dict[str, Any]) -> Tokens:
    """Return this rank's tokens of all steps: [steps, sequences, seq_len + 1]."""
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    rank, size = int(os.environ["RANK"]), task["microbatch_size"] * task["num_microbatches"]
    return np.array(tokens[:, rank * size : (rank + 1) * size])


def build_adamw(parameters: Iterable[torch.nn.Parameter], task: dict[str, Any]) -> torch.optim.AdamW:
    """Return the optimizer: weight decay is for matrices."""
    given = list(parameters)
    groups = [
        {"params": [one for one in given if one.dim() > 1], "weight_decay": task["weight_decay"]},
        {"params": [one for one in given if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=task["learning_rate"], betas=tuple(task["betas"]), eps=task["eps"], fused=True)
