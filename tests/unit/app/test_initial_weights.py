"""weight_problems: folders that transformers wrote are accepted from their headers alone, and others are not."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_models import write_hf, write_run
from meshwright.app.job.initial_weights import weight_problems
from meshwright.checkpoint.hf.export import export
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.model.gpt2_architecture import GPT2Architecture

KINDS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")

GPT2 = GPT2Architecture.from_dict(
    {**dict.fromkeys(("vocab_size", "dim"), 264), "num_layers": 2, **dict.fromkeys(("num_heads", "num_kv_heads"), 2)}
    | {"head_dim": 132, "ffn_dim": 64, "max_seq_len": 8}
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_wrote_is_accepted(tmp_path: Path, kind: str) -> None:
    write_hf(tmp_path, kind, **({"pad_token_id": None} if kind == "phi3" else {}))
    section = ModelSection(source=str(tmp_path), initial_weights=str(tmp_path))
    assert weight_problems(section) == []
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "norm" in name)
    save_file({**tensors, name: tensors[name][1:].clone()}, file)
    [problem] = weight_problems(section)
    assert f"has other sizes: {name} is [" in problem


def test_the_fused_tensors_of_gpt2_are_accepted(tmp_path: Path) -> None:
    write_run(tmp_path / "run", GPT2)
    export(tmp_path / "run", tmp_path / "out")
    section = ModelSection(source=str(tmp_path / "out"), initial_weights=str(tmp_path / "out"))
    assert weight_problems(section) == []
