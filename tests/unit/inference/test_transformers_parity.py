"""max_logits_difference: zero for the same model, and not for a slightly different one."""

from pathlib import Path

import pytest
import torch

from hf_models import architecture, require_transformers, write_run
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.errors import CheckpointError
from meshwright.inference.transformers_parity import max_logits_difference


def test_another_model_differs(tmp_path: Path) -> None:
    require_transformers()
    model = write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "out")
    assert max_logits_difference(model, tmp_path / "out", torch.float32) < 1e-5
    model.blocks[1].ffn.down.weight[0] *= -1
    assert max_logits_difference(model, tmp_path / "out", torch.float32) > 1e-3


def test_our_weights_are_rounded_as_the_export_rounded_them(tmp_path: Path) -> None:
    require_transformers()
    model = write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "out", weights=ExportFormat("bfloat16"))
    assert max_logits_difference(model, tmp_path / "out", torch.float32) > 1e-4
    assert max_logits_difference(model, tmp_path / "out", torch.bfloat16) < 1e-5


def test_what_is_not_finite_equals_nothing(tmp_path: Path) -> None:
    require_transformers()
    model = write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "out")
    model.head.weight *= 1e38
    model.norm.weight *= 1e4
    with pytest.raises(CheckpointError, match=r"that Meshwright computes are NaN or infinite, though all weights are"):
        max_logits_difference(model, tmp_path / "out", torch.float32)
    model.head.weight[7] = float("nan")
    with pytest.raises(CheckpointError, match=r"^NaN or infinity is in head\.weight \(32 of its values\)"):
        max_logits_difference(model, tmp_path / "out", torch.float32)


def test_a_sliding_window_is_compared_beyond_its_end(tmp_path: Path) -> None:
    require_transformers()
    model = write_run(tmp_path / "run", architecture(sliding_window=8))
    export(tmp_path / "run", tmp_path / "out")
    assert max_logits_difference(model, tmp_path / "out", torch.float32) < 1e-5
