"""FAMILIES: what each model_type of a Hugging Face config.json is called and means, as one table for both directions.

Our fields are written with dots where they lie in a part: router.num_groups. Defaults are those of transformers 5.23
(its configuration_*.py files). What only training uses, such as the weights of a router's losses, is not in here:
config.json holds what a model computes.
"""

from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.gpt_oss_architecture import SWIGLU_GAIN, GptOssArchitecture
from meshwright.spec.model.hf.hf_family import OPTIONAL, SIZES, WIDTH_OF_HEADS, Family
from meshwright.spec.model.moe_architecture import MoEArchitecture

_ROUTER_LOSS = frozenset({"output_router_logits", "router_aux_loss_coef"})

_MOE_ROPE_TYPES = ("default", "llama3", "yarn")
_NO_BIAS = {"attention_bias": False, "attention_dropout": 0.0}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        title="GPT2",
        model_class="LMHeadModel",
        architecture=GPT2Architecture,
        sizes={"vocab_size": "vocab_size", "n_embd": "dim", "n_layer": "num_layers", "n_head": "num_heads"},
        optional={
            "n_inner": "ffn_dim",
            "layer_norm_epsilon": "norm_eps",
            "n_positions": "max_seq_len",
            "tie_word_embeddings": "tie_embeddings",
        },
        defaults={
            "head_dim": WIDTH_OF_HEADS,
            "norm_eps": 1e-5,
            "max_seq_len": 1024,
            "tie_embeddings": True,
        },
        only={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        written={"activation_function": "gelu_new"},
        # n_ctx repeats n_positions; reorder_and_upcast_attn computes the same in another order and width.
        harmless=frozenset(
            {
                *("n_ctx", "reorder_and_upcast_attn", "task_specific_params", "summary_type", "summary_use_proj"),
                *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
            }
        ),
        rope_types=(),
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "llama": Family(
        title="Llama",
        defaults={"head_dim": WIDTH_OF_HEADS, "norm_eps": 1e-6, "max_seq_len": 2048},
        implied={"qk_norm": False},
        written={**_NO_BIAS, "mlp_bias": False},
    ),
    "mistral": Family(
        title="Mistral",
        # Here a window counts without use_sliding_window.
        optional={**OPTIONAL, "sliding_window": "sliding_window"},
        defaults={
            "num_kv_heads": 8,
            "head_dim": WIDTH_OF_HEADS,
            "norm_eps": 1e-6,
            "max_seq_len": 131_072,
            "sliding_window": 4096,
        },
        implied={"qk_norm": False},
        written={"attention_dropout": 0.0},
    ),
    "qwen2": Family(
        title="Qwen2",
        defaults={"num_kv_heads": 32, "head_dim": WIDTH_OF_HEADS, "norm_eps": 1e-6, "max_seq_len": 32_768},
        implied={"qk_norm": False, "qkv_bias": True},
        has_window_switch=True,
        written={"attention_dropout": 0.0, "use_sliding_window": False},
    ),
    "qwen3": Family(
        title="Qwen3",
        defaults={"num_kv_heads": 32, "head_dim": 128, "norm_eps": 1e-6, "max_seq_len": 32_768},
        implied={"qk_norm": True},
        has_window_switch=True,
        written={**_NO_BIAS, "use_sliding_window": False},
    ),
    "phi3": Family(
        title="Phi3",
        # An export is a Llama or, with a window, a Mistral. Here a window counts without use_sliding_window.
        optional={**OPTIONAL, "sliding_window": "sliding_window"},
        defaults={"head_dim": WIDTH_OF_HEADS, "norm_eps": 1e-5, "max_seq_len": 4096},
        implied={"qk_norm": False},
        only={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        # This one counts only with rope_type longrope, which is refused.
        harmless=frozenset({"original_max_position_embeddings", "auto_map"}),
    ),
    "mixtral": Family(
        title="Mixtral",
        architecture=MoEArchitecture,
        sizes={
            **SIZES,
            # No layer has a plain feed-forward network: the width is that of an expert.
            "intermediate_size": "expert_ffn_dim",
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
        },
        defaults={
            "num_kv_heads": 8,
            "head_dim": WIDTH_OF_HEADS,
            "norm_eps": 1e-5,
            "max_seq_len": 131_072,
            "rope_theta": 1_000_000.0,
        },
        implied={
            "qk_norm": False,
            "num_dense_layers": 0,
            "num_shared_experts": 0,
            "router.score": "softmax",
            "router.normalize_weights": True,
            "router.weight_scale": 1.0,
        },
        # Here a window counts without use_sliding_window.
        only={"router_jitter_noise": 0.0, "sliding_window": None},
        written={"attention_dropout": 0.0, "sliding_window": None},
        harmless=_ROUTER_LOSS,
        rope_types=_MOE_ROPE_TYPES,
    ),
    "qwen3_moe": Family(
        title="Qwen3Moe",
        architecture=MoEArchitecture,
        sizes={
            **SIZES,
            "num_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_ffn_dim",
        },
        optional={**OPTIONAL, "norm_topk_prob": "router.normalize_weights"},
        defaults={
            "num_kv_heads": 4,
            "head_dim": WIDTH_OF_HEADS,
            "norm_eps": 1e-6,
            "max_seq_len": 32_768,
            "router.normalize_weights": False,
        },
        implied={
            "qk_norm": True,
            "num_shared_experts": 0,
            "router.score": "softmax",
            "router.weight_scale": 1.0,
        },
        only={"decoder_sparse_step": 1},
        written={**_NO_BIAS, "use_sliding_window": False, "decoder_sparse_step": 1},
        harmless=_ROUTER_LOSS | {"mlp_only_layers"},
        rope_types=_MOE_ROPE_TYPES,
    ),
    "gpt_oss": Family(
        title="GptOss",
        architecture=GptOssArchitecture,
        sizes={
            **SIZES,
            "intermediate_size": "expert_ffn_dim",
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
        },
        optional={**OPTIONAL, "sliding_window": "sliding_window", "swiglu_limit": "swiglu_limit"},
        defaults={
            "num_kv_heads": 8,
            "head_dim": 64,
            "norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "max_seq_len": 131_072,
            "sliding_window": 128,
            "layer_types": ("sliding_attention", "full_attention"),
        },
        implied={
            "qk_norm": False,
            "qkv_bias": True,
            "num_dense_layers": 0,
            "num_shared_experts": 0,
            "router.score": "softmax",
            "router.normalize_weights": True,
            "router.weight_scale": 1.0,
        },
        only={"attention_bias": True, "swiglu_alpha": SWIGLU_GAIN},
        written={"attention_bias": True, "attention_dropout": 0.0},
        # The last two repeat num_experts_per_tok and the original length of yarn.
        harmless=_ROUTER_LOSS | {"experts_per_token", "initial_context_length"},
        rope_types=_MOE_ROPE_TYPES,
        default_rope={
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"truncate": False, "original_max_position_embeddings": 4096},
        },
    ),
    "deepseek_v3": Family(
        title="DeepseekV3",
        architecture=MoEArchitecture,
        sizes={
            **SIZES,
            "n_routed_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_ffn_dim",
            "kv_lora_rank": "latent.kv_rank",
            "qk_nope_head_dim": "latent.plain_head_dim",
            "qk_rope_head_dim": "latent.rope_head_dim",
            "v_head_dim": "latent.value_head_dim",
        },
        optional={
            **{theirs: ours for theirs, ours in OPTIONAL.items() if theirs != "head_dim"},
            "q_lora_rank": "latent.query_rank",
            "n_shared_experts": "num_shared_experts",
            "n_group": "router.num_groups",
            "topk_group": "router.groups_per_token",
            "first_k_dense_replace": "num_dense_layers",
            "norm_topk_prob": "router.normalize_weights",
            "routed_scaling_factor": "router.weight_scale",
            "rope_interleave": "rope_interleaved",
        },
        defaults={
            "norm_eps": 1e-6,
            "max_seq_len": 4096,
            "latent.query_rank": 1536,
            "num_shared_experts": 1,
            "router.num_groups": 8,
            "router.groups_per_token": 4,
            "num_dense_layers": 3,
            "router.normalize_weights": True,
            "router.weight_scale": 2.5,
            "rope_interleaved": True,
        },
        # The step of the bias is that of DeepSeek-V3's training (arXiv:2412.19437, 4.2); no config has it.
        implied={"qk_norm": False, "router.score": "sigmoid", "router.bias_update_rate": 0.001},
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        written=_NO_BIAS,
        # head_dim and qk_head_dim follow from the parts of a head. The layers that predict further tokens come after
        # the last one, and do not change what it predicts.
        harmless=frozenset(
            {
                *("head_dim", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers", "output_router_logits"),
                *("ep_size", "seq_aux", "aux_loss_alpha", "auto_map"),
            }
        ),
        rope_types=_MOE_ROPE_TYPES,
    ),
}
"""By model_type."""

ALIASES = {"qwen3_moe": {"num_local_experts": "num_experts"}}
"""Other spellings of a key: transformers 5 writes num_local_experts, the published folders have num_experts."""
