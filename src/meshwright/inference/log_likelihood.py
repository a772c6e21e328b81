"""Log-likelihoods of continuations under a model, in batches.

Shapes: B rows of a batch, S positions, D dim, C tokens of all continuations of a batch, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.questions.continuation import Continuation, cut_note
from meshwright.log import logger
from meshwright.models.gpt2 import GPT2
from meshwright.models.llama import Llama


class LogLikelihood(NamedTuple):
    """Of one continuation."""

    value: float
    """Sum of the natural logarithms of its tokens' probabilities."""
    is_greedy: bool
    """Whether each of its tokens is the most likely one."""


@torch.inference_mode()
def log_likelihoods(model: Llama | GPT2, continuations: Sequence[Continuation], batch_size: int) -> list[LogLikelihood]:
    """Return the log-likelihood of each continuation, in float32; `batch_size` rows are computed at once.

    Continuations of the same inputs, such as single letters after one query, share a row.
    """
    if note := cut_note(continuations):
        logger.warning("%s", note.removeprefix("; "))
    places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, continuation in enumerate(continuations):
        places[continuation.inputs].append(place)
    found: dict[int, LogLikelihood] = {}
    # The longest first: rows of a batch are about as long, and what takes the most memory comes at once.
    rows = sorted(places, key=len, reverse=True)
    with _returning_hidden(model) as head_weight_VD:
        for first in range(0, len(rows), batch_size):
            batch = rows[first : first + batch_size]
            hidden_BSD = model(_padded(batch).to(head_weight_VD.device))
            for row, inputs in enumerate(batch):
                own = [continuations[place] for place in places[inputs]]
                values = _of_row(hidden_BSD[row, : len(inputs)], head_weight_VD, own)
                found.update(zip(places[inputs], values, strict=True))
    return [found[place] for place in range(len(continuations))]


def _of_row(hidden_SD: Tensor, weight_VD: Tensor, continuations: Sequence[Continuation]) -> list[LogLikelihood]:
    """Return the log-likelihoods of continuations of one row, whose head is computed where targets are."""
    longest = max(len(one.targets) for one in continuations)
    log_probabilities_CV = F.linear(hidden_SD[-longest:], weight_VD).float().log_softmax(-1)
    likeliest_C = log_probabilities_CV.argmax(-1)
    found = []
    for one in continuations:
        target_C = torch.tensor(one.targets, device=weight_VD.device)
        last = slice(longest - len(target_C), longest)
        value = log_probabilities_CV[last].gather(1, target_C[:, None]).sum().item()
        found.append(LogLikelihood(value, bool((likeliest_C[last] == target_C).all())))
    return found


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return tokens_BS, filled up after each row, where no earlier token attends."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


@contextmanager
def _returning_hidden(model: Llama | GPT2) -> Iterator[Tensor]:
    """Let forward return the input of the head, and yield the head's weight: logits of all positions would not fit."""
    weight_VD: Tensor = model.get_submodule(model.last_parts[-1]).weight  # type: ignore[assignment]
    model.returns_hidden = True
    try:
        yield weight_VD
    finally:
        model.returns_hidden = False
