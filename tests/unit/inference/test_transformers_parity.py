"""max_logits_difference: zero for the same model, and not for a slightly different one."""

from pathlib import Path

import torch

from hf_models import architecture, require_transformers, write_run
from meshwright.checkpoint.hf.export import ExportFormat, export
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
