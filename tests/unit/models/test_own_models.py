"""The examples of bringing one's own model learn, by a loop written out: they need nothing of the trainer's."""

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.models.build import build_model
from meshwright.models.contract import blocks_of, loss_of
from meshwright.spec.job.job import Job
from repository import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(params=["spectral_denoiser", "hf_causal_lm"])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Job:
    if request.param == "hf_causal_lm":
        pytest.importorskip("transformers", reason="needs meshwright[hf]")
    monkeypatch.syspath_prepend(EXAMPLES)
    return Job.from_dict(tomllib.loads((EXAMPLES / f"{request.param}.toml").read_text()))


def test_example_is_short(job: Job) -> None:
    source = EXAMPLES / f"{job.model.source.partition(':')[0]}.py"
    assert len(source.read_text().splitlines()) < 60


def test_constructor_is_a_function_of_the_seed(job: Job) -> None:
    one, other = _build(job).state_dict(), _build(job).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_blocks_hold_most_of_the_model(job: Job) -> None:
    model = _build(job)
    in_blocks = sum(parameter.numel() for parameter in blocks_of(model).parameters())
    assert in_blocks > 0.5 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_loss_falls(job: Job) -> None:
    model = _build(job)
    loss_function, read = loss_of(model), _reader(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(15):
        inputs, targets = read(range(8 * step, 8 * step + 8))
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses


def _build(job: Job) -> nn.Module:
    torch.manual_seed(job.train.seed)
    return build_model(job.model)


def _reader(job: Job) -> Any:
    """Return the job's own data as batches, or bytes of this file for a job that trains on text."""
    if ":" in job.data.source:
        module, _, name = job.data.source.partition(":")
        data = getattr(importlib.import_module(module), name)(**job.data.options)

        def read_own(indices: range) -> list[Tensor]:
            columns = zip(*(data[index] for index in indices), strict=True)
            return [torch.stack([torch.as_tensor(value) for value in column]) for column in columns]

        return read_own
    text = torch.tensor(list(Path(__file__).read_bytes()))

    def read_text(indices: range) -> tuple[Tensor, Tensor]:
        windows = torch.stack([text[17 * index :][:65] for index in indices])
        return windows[:, :-1], windows[:, 1:]

    return read_text
