"""max_logits_difference: zero for the same model, and not for a slightly different one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_models import architecture, require_transformers, write_run
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.errors import CheckpointError, UnsupportedError
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


@pytest.mark.parametrize(
    ("config", "weights", "error", "message"),
    [
        (
            {"model_type": "mine"},
            {},
            UnsupportedError,
            r"model_type = 'mine', of which transformers .* no causal",
        ),
        ({"model_type": "vit"}, {}, UnsupportedError, r"model_type = 'vit', of which transformers .* no causal"),
        ({"num_attention_heads": "4"}, {}, CheckpointError, r"cannot load it \(.*: correct config"),
        ({"attention_bias": True}, {}, CheckpointError, r"misses model\.layers\.0\.self_attn\.k_proj\.bias, .* 4 more"),
        (
            {"vocab_size": 300},
            {},
            CheckpointError,
            r"has other sizes of lm_head\.weight \[264, 32\] \(needs \[300, 32\]\)",
        ),
        (
            {},
            {"more": torch.ones(1)},
            CheckpointError,
            r"has no use for more: correct the rows of these names",
        ),
    ],
)
def test_a_folder_that_transformers_reads_as_another_model(
    tmp_path: Path, config: dict[str, Any], weights: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    require_transformers()
    model = write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**written, **config}))
    save_file({**load_file(tmp_path / "out" / "model.safetensors"), **weights}, tmp_path / "out" / "model.safetensors")
    with pytest.raises(error, match=message):
        max_logits_difference(model, tmp_path / "out", torch.float32)


def test_what_is_no_logits_is_refused(tmp_path: Path) -> None:
    require_transformers()
    write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"forward returned \[2, 64\] where transformers .* \[2, 64, 264\]"):
        max_logits_difference(nn.Identity(), tmp_path / "out", torch.float32)
