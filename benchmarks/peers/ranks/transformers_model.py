"""transformers' model for one rank, and its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.ranks.tokens import Tokens


def load_model(folder: Path) -> Any:
    """Return the model with the initial weights, in float32, ready to train."""
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    model.config.use_cache = False
    return model.train()


def as_batch(rows: Tokens) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward; `shift_labels` are targets of all positions, as ours are."""
    tokens = torch.from_numpy(rows.copy())
    inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    return {"input_ids": inputs, "labels": targets, "shift_labels": targets}
