"""One rank of litgpt's GPT in a Fabric loop, with DDP if there are several.

python -m benchmarks.peers.ranks.litgpt_rank FOLDER [compiled]

`litgpt pretrain` itself does not run on two CPU ranks: it takes FSDP whenever there are several devices, which
Lightning refuses without CUDA. So these are its model, its loss and the calls of its loop, under Fabric's DDP. It
compiles the whole model, as `pretrain` does, before Fabric wraps it. bfloat16 is its default precision, "bf16-mixed".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy
from safetensors.torch import load_file

from benchmarks.peers.ranks.tokens import build_adamw, rows_of_rank
from benchmarks.peers.turns import Turns, read_task


def main() -> None:
    """Train until no turn is left."""
    folder, is_compiled = Path(sys.argv[1]), "compiled" in sys.argv[2:]
    task, turns = read_task(folder), Turns.of_environment()
    num_ranks, size = int(os.environ["WORLD_SIZE"]), task["microbatch_size"]
    fabric = lightning.Fabric(
        accelerator=task["device"],
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        precision="bf16-mixed" if task["precision"] == "bfloat16" else "32-true",
    )
    fabric.launch()
    model: Any = load_gpt(folder, task["seq_len"])
    model = fabric.setup(torch.compile(model) if is_compiled else model)
    optimizer = fabric.setup_optimizers(build_adamw(model.parameters(), task))
    for rows in rows_of_rank(folder, task):
        turns.next()
        total = torch.zeros((), device=fabric.device)
        for tokens in fabric.to_device(torch.from_numpy(rows)).split(size):
            # Several microbatches are measured on one rank alone, which has no gradients to send.
            logits = model(tokens[:, :-1].contiguous())
            loss = chunked_cross_entropy(logits, tokens[:, 1:].contiguous(), chunk_size=0) / task["num_microbatches"]
            fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=task["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        turns.loss = total.item()


def load_gpt(folder: Path, seq_len: int) -> GPT:
    """Return litgpt's model of the same architecture with the initial weights."""
    hf = json.loads((folder / "hf" / "config.json").read_text(encoding="utf-8"))
    config = Config(
        block_size=seq_len,
        padded_vocab_size=hf["vocab_size"],
        n_layer=hf["num_hidden_layers"],
        n_embd=hf["hidden_size"],
        n_head=hf["num_attention_heads"],
        n_query_groups=hf["num_key_value_heads"],
        head_size=hf["head_dim"],
        intermediate_size=hf["intermediate_size"],
        norm_eps=hf["rms_norm_eps"],
        rope_base=int(hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"]),
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config)
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(folder / "hf" / "model.safetensors"))
    model.load_state_dict(weights)
    return model.train()


if __name__ == "__main__":
    main()
