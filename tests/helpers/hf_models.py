"""Tiny models on disk, theirs and ours, for the tests of conversion and generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.checkpoint import save
from meshwright.models.build import build_architecture
from meshwright.models.gpt2 import GPT2
from meshwright.models.initial import initialize
from meshwright.models.llama import Llama
from meshwright.spec.job.job import Job
from meshwright.spec.model.architecture import GPT2Architecture, LlamaArchitecture, RopeScaling
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.run.run import Manifest, Run

# Queries, outputs and all of the feed-forward network are square here: a transposed matrix has the right shape.
SQUARE = {"dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 32}
NARROW = {"dim": 24, "num_heads": 4, "num_kv_heads": 1, "head_dim": 10, "ffn_dim": 40}
THEIR_SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
}
THEIR_EXPERTS = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "num_mtp_layers": 0,
    },
}
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32)


def architecture(**changes: Any) -> LlamaArchitecture:
    return LlamaArchitecture.from_dict({"vocab_size": 264, "num_layers": 2, "max_seq_len": 128, **SQUARE, **changes})


def moe_architecture(**changes: Any) -> MoEArchitecture:
    """Return a small one of Mixtral's kind."""
    experts = {"num_experts": 6, "experts_per_token": 2, "expert_ffn_dim": 16}
    return MoEArchitecture.from_dict({**architecture().to_dict(), **experts, **changes})


def write_run(
    folder: Path, model: LlamaArchitecture, seed: int = 0, data: dict[str, Any] | None = None
) -> Llama | GPT2:
    """Write a run with the checkpoint step-3 of a model with random weights, and return the model."""
    llama = build_architecture(model)
    initialize(llama, seed)
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            # Norms that are all 1 would hide that two of them were swapped.
            if name.endswith(("norm.weight", ".bias")):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
        for name, buffer in llama.named_buffers():
            buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    run = Run(folder)
    buffers = {f"buffer.{name}": buffer for name, buffer in llama.named_buffers() if name in llama.state_dict()}
    save(run.checkpoint(3), {"model": {**dict(llama.named_parameters()), **buffers}, "optimizer": {}}, {"step": 3})
    section: dict[str, Any] = {"source": _preset_like(model), "options": _plain(model.to_dict())}
    if isinstance(model, GPT2Architecture):
        # There is no preset of its kind.
        (folder / "config.json").write_text(json.dumps(architecture_to_hf(model)))
        section = {"source": str(folder / "config.json")}
    job = Job.from_dict({"model": section, "data": data or {}})
    run.manifest.write_text(Manifest(job=job, seed=0, num_parameters=1).to_json())
    return llama.requires_grad_(False).eval()


def _preset_like(model: LlamaArchitecture) -> str:
    if not isinstance(model, MoEArchitecture):
        return "llama-1m"
    return "moe-4m" if model.latent is None else "mla-moe-4m"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a job file can hold: no null."""
    kept = {name: value for name, value in values.items() if value is not None}
    return {name: _plain(value) if isinstance(value, dict) else value for name, value in kept.items()}


def require_transformers() -> Any:
    """Return transformers, or skip the test where meshwright[hf] is not installed."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers


def write_hf(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Write a folder as transformers writes it, of a model with random weights, and return their model."""
    transformers = require_transformers()
    save_options = {key: options.pop(key) for key in ("max_shard_size",) if key in options}
    config = transformers.AutoConfig.for_model(kind, **{**THEIR_SIZES, **THEIR_EXPERTS.get(kind, {}), **options})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
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
