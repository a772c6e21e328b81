"""Block-fp8 folders: dequantised by the scales of their blocks, as by torch's reader; further layers are dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from hf_models import architecture, some_tokens, write_hf
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.maps import layouts
from meshwright.checkpoint.hf.weights import load_hf_parameters
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.inference.loaded_model import load_model

BLOCK = [16, 12]
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp8 values, scales by block, and the matrix that they mean in bfloat16, block by block."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1]))
    meant = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = tuple(slice(i * size, (i + 1) * size) for i, size in zip((row, column), BLOCK, strict=True))
            scales[row, column] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[place] = (values[place].float() * scales[row, column]).bfloat16()
    return values, scales, meant


def write_quantised(folder: Path, kind: str, **options: Any) -> Any:
    """Write a folder whose linear layers are in block-fp8; return the model of transformers with what they mean."""
    model = write_hf(folder, kind, **options)
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if tensors[name].dim() == 2 and "layers" in name and ".gate.weight" not in name:
            tensors[name], tensors[f"{name}_scale_inv"], meant = quantise(tensors[name])
            tensors[f"meant {name}"] = meant
    meant_by_name = {name.removeprefix("meant "): tensors.pop(name) for name in list(tensors) if "meant" in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    model.load_state_dict({**model.state_dict(), **_fused(meant_by_name, model)}, strict=True)
    return model


def _fused(by_name: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return tensors by the names of a module of transformers 5, which stacks experts: gate and up in one."""
    state = model.state_dict()
    fused = {name: tensor for name, tensor in by_name.items() if name in state}
    for name in state:
        if name.endswith("experts.gate_up_proj"):
            stem, count = name.removesuffix("gate_up_proj"), state[name].shape[0]
            each = [
                {part: by_name[f"{stem}{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}
                for e in range(count)
            ]
            fused[name] = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
            fused[f"{stem}down_proj"] = torch.stack([one["down"] for one in each])
    return fused


@pytest.mark.parametrize("piece_bytes", [1 << 20, 100])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_an_import_means_what_the_scales_say(
    tmp_path: Path, kind: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "PIECE_BYTES", piece_bytes)
    theirs = write_quantised(tmp_path / "theirs", kind)
    imported = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert imported.dtypes == ["bfloat16", "float32"]
    assert "quantization_config" not in json.loads((tmp_path / "run" / "config.json").read_text())
    with torch.inference_mode():
        expected = theirs(some_tokens()).logits
        logits = load_model(tmp_path / "run", device=torch.device("cpu")).model(some_tokens())
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_reader_dequantises_to_the_same_bits(tmp_path: Path) -> None:
    write_quantised(tmp_path / "theirs", "llama", intermediate_size=40)
    weights = load_hf_parameters(tmp_path / "theirs", architecture(ffn_dim=40), dtype=None)
    # torch takes square blocks only.
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    values, scales = tensors[name], tensors[f"{name}_scale_inv"]
    square = torch.repeat_interleave(scales, 3, 1)[:, : -(-32 // 4)].repeat_interleave(4, 0)[: 40 // 4]
    index = {"metadata": {}, "weight_map": dict.fromkeys((name, f"{name}_scale_inv"), "model.safetensors")}
    (tmp_path / "square").mkdir()
    save_file({name: values, f"{name}_scale_inv": square.contiguous()}, tmp_path / "square" / "model.safetensors")
    (tmp_path / "square" / "model.safetensors.index.json").write_text(json.dumps(index))
    state = {name: torch.empty(values.shape, dtype=torch.bfloat16)}
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path / "square"), target_dtype=torch.bfloat16, block_size=4)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(weights["blocks.1.ffn.up.weight"], state[name])


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("quantization", "kind", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, UnsupportedError, "quant_method = 'gptq'"),
        ({"quant_method": "mxfp4", "block": 16}, UnsupportedError, "quant_method = 'mxfp4'"),
        ({"quant_method": "fp8"}, UnsupportedError, "weight_block_size = None"),
        ({**QUANTIZATION, "rotation": "hadamard"}, UnsupportedError, "and rotation"),
        ({**QUANTIZATION, "weight_block_size": [16]}, ConfigError, r"weight_block_size = \[16\], but the weights are"),
        ({**QUANTIZATION, "weight_block_size": [16, 16]}, CheckpointError, r"needs F32 \[2, 2\]"),
    ],
)
def test_another_quantisation_is_an_error(
    tmp_path: Path, quantization: dict[str, Any], kind: type[Exception], message: str
) -> None:
    write_quantised(tmp_path / "theirs", "llama")
    change_config(tmp_path / "theirs", quantization_config=quantization)
    with pytest.raises(kind, match=message):
        import_folder(tmp_path / "theirs", tmp_path / "run")


def test_values_without_scales_and_scales_without_values_are_errors(tmp_path: Path) -> None:
    write_quantised(tmp_path / "theirs", "llama")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != f"{name}_scale_inv"}, file)
    with pytest.raises(UnsupportedError, match=rf"holds {name} as F8_E4M3, but only .* with block scales"):
        import_folder(tmp_path / "theirs", tmp_path / "run")
    save_file({**tensors, name: tensors[name].bfloat16()}, file)
    with pytest.raises(ConfigError, match=f"1 unknown: {name}_scale_inv"):
        import_folder(tmp_path / "theirs", tmp_path / "run")


def test_layers_that_predict_further_tokens_are_dropped_by_name(tmp_path: Path) -> None:
    write_hf(tmp_path / "theirs", "deepseek_v3")
    file = tmp_path / "theirs" / "model.safetensors"
    further = {f"model.layers.3.{name}": torch.ones(2) for name in ("enorm.weight", "self_attn.q_a_proj.weight")}
    save_file({**load_file(file), **further}, file)
    change_config(tmp_path / "theirs", num_nextn_predict_layers=1)
    imported = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert list(imported.dropped.values()) == [sorted(further)]
    change_config(tmp_path / "theirs", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"2 unknown: model\.layers\.3\.enorm"):
        import_folder(tmp_path / "theirs", tmp_path / "again")
