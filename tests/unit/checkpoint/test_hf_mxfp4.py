"""MXFP4 folders, as GPT-OSS is published: the bits that transformers unpacks, its logits, and what is refused."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_models import require_transformers, some_tokens, write_hf
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.maps import layouts
from meshwright.checkpoint.hf.quantized_weights import unpack
from meshwright.errors import CheckpointError, UnsupportedError
from meshwright.inference.loaded_model import load_model

MATRICES = ("gate_up_proj", "down_proj")


def unpacked_by_transformers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return what transformers makes of packed weights: its layout is [experts, in, out]."""
    require_transformers()
    module = importlib.import_module("transformers.integrations.mxfp4")
    weight: Tensor = module.convert_moe_packed_tensors(blocks, scales)
    return weight


def random_packed(*shape: int, exponents: tuple[int, int] = (120, 125)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(*exponents, shape, dtype=torch.uint8, generator=generator)


def write_packed(folder: Path) -> None:
    """Write a folder of gpt_oss whose experts are in MXFP4, as the published ones are."""
    write_hf(folder, "gpt_oss", torch.bfloat16, hidden_size=64, intermediate_size=32)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_packed(num_experts, num_out, num_in // 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


@pytest.mark.parametrize("exponents", [(120, 125), (0, 255)])
def test_weights_are_unpacked_to_the_bits_of_transformers(exponents: tuple[int, int]) -> None:
    blocks, scales = random_packed(3, 10, 4, exponents=exponents)
    ours, theirs = unpack(blocks, scales), unpacked_by_transformers(blocks, scales)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert ours.shape == (3, 128, 10)
    assert torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))


@pytest.mark.parametrize("piece_bytes", [1 << 20, 100])
def test_an_import_has_the_weights_and_logits_of_transformers(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "PIECE_BYTES", piece_bytes)
    write_packed(tmp_path / "theirs")
    imported = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert imported.dtypes == ["bfloat16"]
    assert "quantization_config" not in json.loads((tmp_path / "run" / "config.json").read_text())
    packed = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = load_parameters(imported.run.checkpoint(0))
    experts = "model.layers.1.mlp.experts"
    gate_up, down = (unpacked_by_transformers(packed[f"{experts}.{m}_blocks"], packed[f"{experts}.{m}_scales"])
                     for m in MATRICES)  # fmt: skip
    assert torch.equal(ours["blocks.1.ffn.experts.gate"], gate_up[..., 0::2].mT)
    assert torch.equal(ours["blocks.1.ffn.experts.up"], gate_up[..., 1::2].mT)
    assert torch.equal(ours["blocks.1.ffn.experts.down"], down.mT)
    theirs = require_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs.eval()(some_tokens()).logits
        logits = load_model(tmp_path / "run", device=torch.device("cpu")).model(some_tokens())
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("suffix", "change", "kind", "message"),
    [
        ("_scales", None, UnsupportedError, r"gate_up_proj_blocks as U8, but only"),
        ("_scales", lambda scales: scales[:, :-1].clone(), CheckpointError, r"gate_up_proj_scales .* are no MXFP4"),
        ("_blocks", lambda blocks: blocks[..., :8].clone(), CheckpointError, r"are no MXFP4"),
        ("_blocks", lambda blocks: blocks.float(), CheckpointError, r"are no MXFP4"),
    ],
)
def test_damaged_packed_weights_are_refused(
    tmp_path: Path, suffix: str, change: object, kind: type[Exception], message: str
) -> None:
    write_packed(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.mlp.experts.gate_up_proj{suffix}"
    stored = tensors.pop(name)
    if callable(change):
        tensors[name] = change(stored)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(kind, match=message):
        import_folder(tmp_path / "theirs", tmp_path / "run")
