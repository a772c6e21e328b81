"""Rows of files of measured runs, made up, one of each kind of model."""

from __future__ import annotations

import json
from typing import Any

DENSE = {
    "id": "dense",
    "source": "made up",
    "model_family": "llama3-8b",
    "n_layers": "32",
    "hidden": "4096",
    "ffn_hidden": "14336",
    "n_heads": "32",
    "n_kv_heads": "8",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100-80GB",
    "n_gpus": "64",
    "gpus_per_node": "8",
    "interconnect": "NVLink + 8x InfiniBand 400 Gb/s",
    "tp": "2",
    "cp": "1",
    "pp": "1",
    "micro_batch": "1",
    "global_batch": "128",
    "activation_ckpt": "selective",
    "fsdp_zero_stage": "3",
    "precision": "bf16",
    "mlp_type": "swiglu",
    "step_time_s": "2.5",
    "mem_gb_per_gpu": "40",
    "mem_kind": "reserved",
    "stack": "torchtitan-2025",
}
PIPELINE = (
    DENSE
    | {"id": "pipeline", "tp": "4", "pp": "4", "vpp": "2", "stack": "megatron-core-2024"}
    | {"fsdp_zero_stage": ""}
)
MIXTURE = DENSE | {
    "id": "mixture",
    "model_family": "mixtral-8x7b",
    "vocab": "32000",
    "moe_experts": "8",
    "moe_topk": "2",
    "ep": "8",
    "tp": "1",
    "stack": "megatron-bridge-26",
}
LATENT = MIXTURE | {
    "id": "latent",
    "model_family": "deepseek-v3",
    "hidden": "7168",
    "n_heads": "128",
    "n_kv_heads": "128",
    "moe_experts": "256",
    "moe_topk": "8",
    "arch_json": json.dumps(
        {
            **{"attn": "mla", "q_lora": 1536, "kv_lora": 512, "qk_nope": 128, "qk_rope": 64, "v_head": 128},
            **{"moe_ffn": 2048, "shared_experts": 1, "first_dense": 3},
        }
    ),
}
WINDOWED = MIXTURE | {
    "id": "windowed",
    "arch_json": json.dumps({"sliding_window": 1024, "swa_alternate": 2, "head_dim": 64, "pos": "rope"}),
}
ROWS = (DENSE, PIPELINE, MIXTURE, LATENT, WINDOWED)


def row(of: dict[str, str] = DENSE, **cells: Any) -> dict[str, str | None]:
    """Return a row with other cells; None empties one."""
    return {**of, **{name: "" if value is None else str(value) for name, value in cells.items()}}
