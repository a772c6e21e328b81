"""Logits of each family of models, before an import, after it and after an export: run as a module.

For each family that `import` reads, transformers makes a tiny model with random weights and saves it; that folder is
imported and exported again. All compute the same tokens in float32: transformers from its own folder, Meshwright from
the run, transformers from the export. Exit code 1 if a difference is above the bar of 1e-4, if a key is lost, or if the
control, two norms exchanged, is not above the bar: then the comparison would be blind.

Expected, written before the first run: 1e-6 for ours, as sums have another order; 0 for the export, where weights
return bitwise, also as a family of another name (mistral and phi3 leave as llama): then 1e-6.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from meshwright.checkpoint.hf.export import export
from meshwright.checkpoint.hf.folder import HfFolder
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.safetensors.weight_index import CONFIG, read_json
from meshwright.inference.loaded_model import load_model

BAR = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
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
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama 3.2, tied": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "phi3": ("phi3", {}),
}
"""Name: transformers' model type, and its config where it is another than SIZES."""


class Found(NamedTuple):
    """What one family's way there and back found."""

    exported_as: str
    ours: float
    """Largest difference of Meshwright's logits from transformers'."""
    exported: float
    """The same of transformers' logits from the export."""
    swapped: float
    """The control: the same of Meshwright's logits with two norms exchanged."""
    num_keys: int
    dropped: int
    lost: int
    """Keys that the first folder has and the export lacks, if both are of one family."""


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # that some leave as another family stands in the table
    heads = ("family", "leaves as", "keys", "mapped", "dropped", "lost", "import", "export", "norms swapped")
    table = Table(
        *heads,
        title=f"Keys, and largest differences of logits in float32, next to transformers {transformers.__version__}",
    )
    is_good = True
    for name in parser.parse_args().families:
        with tempfile.TemporaryDirectory() as folder:
            found = there_and_back(*FAMILIES[name], Path(folder))
        mapped = found.num_keys - found.dropped
        counts = map(str, (found.num_keys, mapped, found.dropped, found.lost))
        table.add_row(
            name, found.exported_as, *counts, f"{found.ours:.1e}", f"{found.exported:.1e}", f"{found.swapped:.1e}"
        )
        is_good &= max(found.ours, found.exported) <= BAR < found.swapped and not found.lost
    Console().print(table)
    return 0 if is_good else 1


def there_and_back(kind: str, options: dict[str, Any], folder: Path) -> Found:
    """Write a model of theirs, import and export it, and compare the logits of all three."""
    first, run, last = (folder / name for name in ("theirs", "run", "exported"))
    write_theirs(first, kind, options)
    imported = import_folder(first, run)
    export(run, last)
    tokens_BS = torch.randint(SIZES["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(5))
    expected_BSV = their_logits(first, tokens_BS)
    model = load_model(run).model
    with torch.inference_mode():
        ours_BSV = model(tokens_BS)
        swap_norms(model)
        swapped_BSV = model(tokens_BS)
    before, after = HfFolder(first).names, HfFolder(last).names
    leaves_as = read_json(last / CONFIG)["model_type"]
    return Found(
        leaves_as,
        _difference(ours_BSV, expected_BSV),
        _difference(their_logits(last, tokens_BS), expected_BSV),
        _difference(swapped_BSV, expected_BSV),
        len(before),
        sum(map(len, imported.dropped.values())),
        len(before - after) if leaves_as == kind else 0,
    )


def write_theirs(folder: Path, kind: str, options: dict[str, Any]) -> None:
    """Save a model of transformers with random weights, none of them at a default that hides a swap."""
    sizes = {"vocab_size": SIZES["vocab_size"]} if kind == "gpt2" else SIZES
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.save_pretrained(folder)


def their_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    """Return what transformers computes from a folder; raises RuntimeError if a weight is missing or unknown."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(folder, dtype=torch.float32, output_loading_info=True)
    if wrong := [*info["missing_keys"], *info["unexpected_keys"]]:
        raise RuntimeError(f"{folder}: {', '.join(wrong)} missing or unknown")
    with torch.inference_mode():
        logits: Tensor = model.eval()(tokens_BS).logits
    return logits


def swap_norms(model: torch.nn.Module) -> None:
    """Exchange the weights of the first two norms of one size."""
    norms = [each for name, each in model.named_parameters() if name.endswith("norm.weight")]
    first, second = next((a, b) for a, b in pairwise(norms) if a.shape == b.shape)
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def _difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


if __name__ == "__main__":
    sys.exit(main())
