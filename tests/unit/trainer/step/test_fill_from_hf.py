"""model.initial_weights fills buffers that are state, such as a router's bias, and not only parameters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import write_hf
from meshwright.checkpoint.hf.weights import load_hf_parameters
from meshwright.models.build import build_model
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.trainer.step.build_pipeline import described_for_hf, fill_from_hf


def test_the_routers_biases_are_theirs(tmp_path: Path) -> None:
    write_hf(tmp_path / "theirs", "deepseek_v3")
    section = ModelSection(source=str(tmp_path / "theirs"), initial_weights=str(tmp_path / "theirs"))
    architecture = resolve_architecture(section)
    assert architecture is not None
    model = build_model(section)
    fill_from_hf(model, section, described_for_hf(Job(model=section), model))
    weights = load_hf_parameters(tmp_path / "theirs", architecture)
    state = {name.removeprefix("buffer."): tensor for name, tensor in weights.items()}
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert state["blocks.1.ffn.router.bias"].abs().max() > 0


def test_weights_that_are_not_finite_are_remarked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_hf(tmp_path / "theirs", "llama")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = float("-inf")
    save_file(tensors, file)
    section = ModelSection(source=str(tmp_path / "theirs"), initial_weights=str(tmp_path / "theirs"))
    model = build_model(section)
    fill_from_hf(model, section, described_for_hf(Job(model=section), model))
    assert "theirs holds NaN or infinity in 1 tensor, the first is model.layers.1.mlp.up_proj.weight:" in caplog.text
