"""Tiny models on disk, theirs and ours, for the tests of conversion and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.save import save
from meshwright.models.initial import initialize
from meshwright.models.llama import Llama
from meshwright.spec.architecture import LlamaArchitecture, RopeScaling
from meshwright.spec.job import Job
from meshwright.spec.run import Manifest, Run

# Queries, outputs and all of the feed-forward network are square here: a transposed matrix has the right shape.
SQUARE = {"dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 32}
NARROW = {"dim": 24, "num_heads": 4, "num_kv_heads": 1, "head_dim": 10, "ffn_dim": 40}
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32)


def architecture(**changes: Any) -> LlamaArchitecture:
    return LlamaArchitecture.from_dict({"vocab_size": 264, "num_layers": 2, "max_seq_len": 128, **SQUARE, **changes})


def write_run(folder: Path, model: LlamaArchitecture, seed: int = 0, data: dict[str, Any] | None = None) -> Llama:
    """Write a run with the checkpoint step-3 of a model with random weights, and return the model."""
    llama = Llama(model)
    initialize(llama, seed)
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            # Norms that are all 1 would hide that two of them were swapped.
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    run = Run(folder)
    options = {name: value for name, value in model.to_dict().items() if value is not None}
    job = Job.from_dict({"model": {"source": "llama-1m", "options": options}, "data": data or {}})
    save(run.checkpoint(3), {"model": dict(llama.named_parameters()), "optimizer": {}}, {"step": 3})
    run.manifest.write_text(Manifest(job=job, seed=0, num_parameters=1).to_json())
    return llama.requires_grad_(False).eval()


def require_transformers() -> Any:
    """Return transformers, or skip the test where meshwright[hf] is not installed."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers


def write_hf(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Write a folder as transformers writes it, of a model with random weights, and return their model."""
    transformers = require_transformers()
    save_options = {key: options.pop(key) for key in ("max_shard_size",) if key in options}
    config_class = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind]
    config = config_class(
        **{
            "vocab_size": 264,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
            "max_position_embeddings": 128,
            **options,
        }
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, **save_options)
    return model


def their_logits(folder: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Return what transformers computes from a folder, in float32, having found every weight that it looked for."""
    load = require_transformers().AutoModelForCausalLM.from_pretrained
    model, info = load(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens_BS).logits
    return logits


def some_tokens() -> torch.Tensor:
    return torch.randint(264, (2, 48), generator=torch.Generator().manual_seed(5))
