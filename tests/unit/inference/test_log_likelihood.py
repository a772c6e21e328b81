"""Batches of continuations have the log-likelihoods that each has alone, from the logits of all positions."""

from __future__ import annotations

import pytest
import torch

from hf_models import architecture, moe_architecture
from meshwright.data.questions.continuation import Continuation
from meshwright.inference.log_likelihood import log_likelihoods
from meshwright.models.build import build_architecture
from meshwright.models.gpt2 import GPT2
from meshwright.models.initial import initialize
from meshwright.models.llama import Llama
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.gpt2_architecture import GPT2Architecture

SIZES = {"dim": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "ffn_dim": 32, "num_layers": 2}
MODELS = {
    "llama": architecture(),
    "tied": architecture(tie_embeddings=True),
    "experts": moe_architecture(),
    "gpt2": GPT2Architecture.from_dict({**SIZES, "vocab_size": 264, "max_seq_len": 64}),
}


def built(model: LlamaArchitecture) -> Llama | GPT2:
    made = build_architecture(model)
    initialize(made, 0)
    return made.eval()


def alone(model: Llama | GPT2, one: Continuation) -> tuple[float, bool]:
    """Return log-likelihood and greediness of one continuation, from all logits."""
    with torch.no_grad():
        logits_CV = model(torch.tensor([one.inputs]))[0, -len(one.targets) :]
    target_C = torch.tensor(one.targets)
    value = -torch.nn.functional.cross_entropy(logits_CV, target_C, reduction="sum").item()
    return value, bool((logits_CV.argmax(1) == target_C).all())


@pytest.mark.parametrize("name", MODELS)
def test_batches_change_nothing(name: str) -> None:
    model = built(MODELS[name])
    draw = torch.Generator().manual_seed(3)
    continuations = []
    for length, num_targets in ((5, 1), (9, 9), (1, 1), (30, 4), (12, 3)):
        inputs, targets = (torch.randint(264, (count,), generator=draw).tolist() for count in (length, num_targets))
        continuations.append(Continuation(tuple(inputs), tuple(targets)))
    with torch.no_grad():
        greedy = int(model(torch.tensor([continuations[0].inputs]))[0, -1].argmax())
    # Of the same inputs, as the letters of answers are: one of a single token, the likeliest, and one of two.
    same = continuations[0].inputs
    continuations += [Continuation(same, (greedy,)), Continuation(same, (same[-1], greedy))]
    expected = [alone(model, one) for one in continuations]
    assert expected[5][1]
    for batch_size in (1, 2, 16):
        found = log_likelihoods(model, continuations, batch_size)
        assert [one.value for one in found] == pytest.approx([value for value, _ in expected], rel=1e-5)
        assert [one.is_greedy for one in found] == [is_greedy for _, is_greedy in expected]
    # The model generates as before.
    assert model(torch.tensor([[1]])).shape == (1, 1, 264)
