"""PRESETS: named architectures. Each published one says where its figures stand; `meshwright list models` prints them.

Dates are those of reading. The totals of parameters that the publishers print are asserted in the tests.
"""

from typing import Any

from meshwright.spec.model.architecture import LlamaArchitecture, RopeScaling
from meshwright.spec.model.gpt_oss_architecture import GptOssArchitecture
from meshwright.spec.model.moe_architecture import LatentAttention, MoEArchitecture, Router, YarnScaling


def _small(**sizes: int) -> LlamaArchitecture:
    # Our own sizes, for laptops and tests. 288 is the byte tokenizer's 257 ids rounded up to a multiple of 32, and all
    # widths divide by 4, so that every one of them can be split over 2 or 4 ranks. The head is untied: a pipeline
    # can then hold it on its last rank. rope_theta is the usual one for sequences of a few thousand tokens.
    head_dim = sizes["dim"] // sizes["num_heads"]
    return LlamaArchitecture.from_dict(
        {"vocab_size": 288, "head_dim": head_dim, "rope_theta": 10_000.0, "max_seq_len": 4096, **sizes}
    )


def _llama3(**sizes: int) -> LlamaArchitecture:
    # "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3: layers, dim, ffn dim, heads, 8 key/value heads, RoPE
    # base 500,000. The table rounds the vocabulary to 128,000; the released config.json files have 128,256, head_dim
    # 128 (dim / heads) and norm eps 1e-5. 8192 tokens: the length of pretraining before the stretch to 128K. 2026-11.
    head_dim = sizes["dim"] // sizes["num_heads"]
    return LlamaArchitecture.from_dict({"vocab_size": 128_256, "num_kv_heads": 8, "head_dim": head_dim, **sizes})


def _stretched(architecture: LlamaArchitecture, factor: float) -> LlamaArchitecture:
    # config.json of meta-llama/Llama-3.1-8B (factor 8) and meta-llama/Llama-3.2-3B (factor 32): rope_scaling with
    # low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings 8192; 131,072 positions. 2026-11.
    scaling = RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    return architecture.replace(rope_scaling=scaling, max_seq_len=131_072)


# config.json of Qwen/Qwen3-0.6B and Qwen/Qwen3-8B, and "Qwen3 Technical Report" (arXiv:2505.09388), table 1: 8
# key/value heads of 128 in every dense model whatever its dim, normalised queries and keys. 2026-11.
_QWEN3: dict[str, Any] = {
    **{"vocab_size": 151_936, "num_kv_heads": 8, "head_dim": 128, "norm_eps": 1e-6, "rope_theta": 1_000_000.0},
    **{"qk_norm": True, "max_seq_len": 40_960},
}
# config.json of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B, and table 2 of the same report: 128 experts, 8 of them
# for each token, none shared. 2026-11.
_QWEN3_MOE: dict[str, Any] = {**_QWEN3, "num_kv_heads": 4, "num_experts": 128, "experts_per_token": 8}


def _qwen3(**sizes: int) -> LlamaArchitecture:
    return LlamaArchitecture.from_dict(_QWEN3 | sizes)


def _qwen3_moe(**sizes: int) -> MoEArchitecture:
    return MoEArchitecture.from_dict(_QWEN3_MOE | sizes)


# "Mixtral of Experts" (arXiv:2401.04088), table 1, and config.json of mistralai/Mixtral-8x7B-v0.1. 2026-11.
_MIXTRAL_8X7B = MoEArchitecture(
    vocab_size=32_000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=14_336,
    rope_theta=1_000_000.0,
    max_seq_len=32_768,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_dim=14_336,
)
# "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 4.2, and config.json of deepseek-ai/DeepSeek-V3, whose
# RoPE is stretched from 4096 tokens. Its layer that predicts a further token is not built. 2026-11.
_DEEPSEEK_V3 = MoEArchitecture(
    vocab_size=129_280,
    dim=7168,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    ffn_dim=18_432,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    max_seq_len=163_840,
    num_experts=256,
    experts_per_token=8,
    expert_ffn_dim=2048,
    num_shared_experts=1,
    num_dense_layers=3,
    router=Router(score="sigmoid", weight_scale=2.5, num_groups=8, groups_per_token=4, bias_update_rate=0.001),
    latent=LatentAttention(query_rank=1536, kv_rank=512, plain_head_dim=128, rope_head_dim=64, value_head_dim=128),
    yarn=YarnScaling(factor=40.0, mscale=1.0, mscale_all_dim=1.0, original_max_seq_len=4096),
    rope_interleaved=True,
)

# "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925), section 2 and table 1, and config.json of
# openai/gpt-oss-20b and openai/gpt-oss-120b. Every second layer has the window. 2026-11.
_GPT_OSS_20B = GptOssArchitecture(
    vocab_size=201_088,
    dim=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    ffn_dim=2880,
    rope_theta=150_000.0,
    max_seq_len=131_072,
    num_experts=32,
    experts_per_token=4,
    expert_ffn_dim=2880,
    yarn=YarnScaling(factor=32.0, original_max_seq_len=4096, truncate=False),
)

# Our own sizes again, of the shapes of Mixtral, of GPT-OSS and of DeepSeek-V3; all that ranks share divides by 4.
_SMALL_SIZES = {"vocab_size": 288, "dim": 128, "num_layers": 4, "num_heads": 4, "rope_theta": 10_000.0}
_MOE_4M = MoEArchitecture.from_dict(
    {
        **_SMALL_SIZES,
        **{"num_kv_heads": 2, "head_dim": 32, "ffn_dim": 320, "max_seq_len": 4096},
        **{"num_experts": 8, "experts_per_token": 2, "expert_ffn_dim": 320},
    }
)
_GPT_OSS_4M = GptOssArchitecture.from_dict(
    {
        **_MOE_4M.to_dict(),
        **{"qkv_bias": True, "sliding_window": 32, "layer_types": _GPT_OSS_20B.layer_types},
        "yarn": YarnScaling(factor=4.0, original_max_seq_len=1024, truncate=False),
    }
)
_MLA_MOE_4M = MoEArchitecture.from_dict(
    {
        **_SMALL_SIZES,
        **{"num_kv_heads": 4, "head_dim": 48, "ffn_dim": 512, "max_seq_len": 4096},
        **{"num_experts": 16, "experts_per_token": 4, "expert_ffn_dim": 160},
        **{"num_shared_experts": 1, "num_dense_layers": 1, "rope_interleaved": True},
        "router": {"score": "sigmoid", "num_groups": 4, "groups_per_token": 2, "bias_update_rate": 0.001},
        "latent": {
            **{"query_rank": 96, "kv_rank": 64, "plain_head_dim": 32, "rope_head_dim": 16, "value_head_dim": 32},
        },
    }
)

_LLAMA3_8B = _llama3(dim=4096, num_layers=32, num_heads=32, ffn_dim=14_336)
_LLAMA3_70B = _llama3(dim=8192, num_layers=80, num_heads=64, ffn_dim=28_672)
# "Llama 2: Open Foundation and Fine-Tuned Chat Models" (arXiv:2307.09288), table 1, and config.json of
# meta-llama/Llama-2-70b-hf: 8 key/value heads of 128, RoPE base 10,000, norm eps 1e-5. 2026-11, from memory.
_LLAMA2_70B = _LLAMA3_70B.replace(vocab_size=32_000, rope_theta=10_000.0, max_seq_len=4096)
_LLAMA3_405B = _llama3(dim=16_384, num_layers=126, num_heads=128, ffn_dim=53_248)
# config.json of meta-llama/Llama-3.2-1B and -3B: head_dim 64 and 128, embeddings tied. 2026-11.
_LLAMA32_1B = _llama3(dim=2048, num_layers=16, num_heads=32, ffn_dim=8192).replace(tie_embeddings=True)
_LLAMA32_3B = _llama3(dim=3072, num_layers=28, num_heads=24, ffn_dim=8192).replace(tie_embeddings=True)

PRESETS: dict[str, LlamaArchitecture] = {
    "llama-1m": _small(dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=512),
    "llama-15m": _small(dim=384, num_layers=8, num_heads=8, num_kv_heads=4, ffn_dim=1280),
    "llama-100m": _small(dim=768, num_layers=12, num_heads=12, num_kv_heads=4, ffn_dim=3072),
    "llama2-70b": _LLAMA2_70B,
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": _LLAMA3_70B,
    "llama3-405b": _LLAMA3_405B,
    "llama3.1-8b": _stretched(_LLAMA3_8B, factor=8.0),
    "llama3.1-70b": _stretched(_LLAMA3_70B, factor=8.0),
    "llama3.1-405b": _stretched(_LLAMA3_405B, factor=8.0),
    "llama3.2-1b": _stretched(_LLAMA32_1B, factor=32.0),
    "llama3.2-3b": _stretched(_LLAMA32_3B, factor=32.0),
    "qwen3-0.6b": _qwen3(dim=1024, num_layers=28, num_heads=16, ffn_dim=3072, tie_embeddings=True),
    "qwen3-8b": _qwen3(dim=4096, num_layers=36, num_heads=32, ffn_dim=12_288),
    "moe-4m": _MOE_4M,
    "mla-moe-4m": _MLA_MOE_4M,
    "gpt-oss-4m": _GPT_OSS_4M,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "qwen3-30b-a3b": _qwen3_moe(dim=2048, num_layers=48, num_heads=32, ffn_dim=6144, expert_ffn_dim=768),
    "qwen3-235b-a22b": _qwen3_moe(dim=4096, num_layers=94, num_heads=64, ffn_dim=12_288, expert_ffn_dim=1536),
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-120b": _GPT_OSS_20B.replace(num_layers=36, num_experts=128),
    "deepseek-v3": _DEEPSEEK_V3,
}
"""Architectures by the name that `model.source` takes."""
