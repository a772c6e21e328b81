"""architecture_from_hf and architecture_to_hf: a Hugging Face config.json of a Llama or Qwen3 model, both ways.

What changes the function that the model computes is either understood or refused by name; what does not is listed.
Reads both spellings of RoPE: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.architecture import LlamaArchitecture, RopeScaling

_MODEL_TYPES = ("llama", "qwen3")

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
}
"""Keys that every config must have -> our fields."""

_OPTIONAL = {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tie_embeddings",
}
"""Keys for which transformers has a default -> our fields."""

_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}

_ONLY_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "is_encoder_decoder": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
"""Keys that would change the model, with the one value that leaves it as ours is."""

_HARMLESS = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "initializer_range"),
    *("use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward"),
    *("id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions"),
    *("max_length", "temperature", "top_p", "top_k", "do_sample"),
    *("sliding_window", "max_window_layers", "layer_types"),
}
"""Keys that do not change the logits: provenance, storage, generation defaults, other heads. The last line counts only
with use_sliding_window; layer_types is looked into on its own."""


def architecture_from_hf(config: dict[str, Any], source: str = "config.json") -> LlamaArchitecture:
    """Return the architecture that `config` describes; `source` names it in errors.

    Raises UnsupportedError for a model or an attribute that Meshwright does not compute, ConfigError for a broken file.
    """
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise UnsupportedError(
            f"{source} has model_type = {model_type!r}, but Meshwright reads {' and '.join(_MODEL_TYPES)} only: "
            "choose another model.source, or bring the model as my_module:MyModel"
        )
    _refuse_unsupported(config, source)
    missing = [key for key in _SIZES if type(config.get(key)) is not int or config[key] < 1]
    if missing:
        raise ConfigError(
            f"{source} has no whole number above 0 for {', '.join(missing)}, which every {model_type} config has: "
            "take the whole config.json of the model"
        )
    fields = {ours: config[theirs] for theirs, ours in _SIZES.items()}
    fields |= _defaults(config, source)
    fields |= {ours: config[theirs] for theirs, ours in _OPTIONAL.items() if config.get(theirs) is not None}
    try:
        return LlamaArchitecture.from_dict({**fields, **_rope_fields(config, source), "qk_norm": model_type == "qwen3"})
    except ValidationError as error:
        theirs = {ours: key for key, ours in {**_SIZES, **_OPTIONAL}.items()}
        raise ConfigError("\n".join(_explain(problem, source, theirs) for problem in error.errors())) from None


def architecture_to_hf(architecture: LlamaArchitecture) -> dict[str, Any]:
    """Return the config that transformers 4 and 5 read as `architecture`; token ids and dtype are the caller's to add.

    RoPE is written in the older spelling, which both versions and the inference engines understand.
    """
    model_type, name = ("qwen3", "Qwen3") if architecture.qk_norm else ("llama", "Llama")
    scaling = architecture.rope_scaling
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        **{theirs: getattr(architecture, ours) for theirs, ours in {**_SIZES, **_OPTIONAL}.items()},
        "rope_theta": architecture.rope_theta,
        "rope_scaling": None if scaling is None else _scaling_to_hf(scaling),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **({"use_sliding_window": False} if architecture.qk_norm else {"mlp_bias": False}),
    }


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def _refuse_unsupported(config: dict[str, Any], source: str) -> None:
    for key, allowed in _ONLY_VALUES.items():
        if config.get(key, allowed) != allowed:
            raise UnsupportedError(
                f"{source} has {key} = {config[key]!r}, which Meshwright does not compute: it would have to be "
                f"{allowed!r}; choose another model.source, or bring the model as my_module:MyModel"
            )
    unlike = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if unlike:
        raise UnsupportedError(
            f"{source} has layers of type {', '.join(unlike)} in layer_types, but Meshwright computes full_attention "
            "only: choose another model.source, or bring the model as my_module:MyModel"
        )
    known = {*_SIZES, *_OPTIONAL, *_ONLY_VALUES, *_ROPE_KEYS, *_HARMLESS}
    unknown = sorted(key for key in config if key not in known and not key.startswith("_"))
    if unknown:
        raise UnsupportedError(
            f"{source} has {', '.join(unknown)}, of which Meshwright does not know whether the model changes with it: "
            "if it does not, remove it from a copy of the file and name the copy in model.source"
        )


def _defaults(config: dict[str, Any], source: str) -> dict[str, Any]:
    # What transformers 5.23 (configuration_llama.py, configuration_qwen3.py) takes where a key is absent.
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if config["model_type"] == "qwen3":
        kv_heads = heads if "num_key_value_heads" in config else 32
        return {"num_kv_heads": kv_heads, "head_dim": 128, "norm_eps": 1e-6, "max_seq_len": 32_768}
    if config.get("head_dim") is None and width % heads:
        raise ConfigError(
            f"{source} has no head_dim, and hidden_size = {width} does not divide by num_attention_heads = {heads}: "
            "set head_dim, or make them divide"
        )
    return {"num_kv_heads": heads, "head_dim": width // heads, "norm_eps": 1e-6, "max_seq_len": 2048}


def _rope_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    rope = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, dict):
            raise ConfigError(f"{source} has {key} = {config[key]!r} where an object was expected: correct it there")
        rope |= config.get(key) or {}
    theta = rope.pop("rope_theta")
    fields: dict[str, Any] = {"rope_theta": 10_000.0 if theta is None else theta}
    # "type" is the older name of "rope_type"; some files have both.
    legacy_type = rope.pop("type", None)
    rope_type = rope.pop("rope_type", legacy_type) or "default"
    if rope_type not in ("default", "llama3"):
        raise UnsupportedError(
            f"{source} has rope_type = {rope_type!r}, but Meshwright computes 'default' and 'llama3' only: "
            "choose another model.source, or bring the model as my_module:MyModel"
        )
    names = {"original_max_position_embeddings": "original_max_seq_len"}
    scaling = {names.get(key, key): value for key, value in rope.items() if value is not None}
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(
            f"{source} turns only a part of each head (partial_rotary_factor), which Meshwright does not compute: "
            "choose another model.source, or bring the model as my_module:MyModel"
        )
    if rope_type == "llama3":
        return {**fields, "rope_scaling": scaling}
    if scaling:
        raise UnsupportedError(
            f"{source} has {', '.join(sorted(scaling))} with the default RoPE, which takes none: "
            "set rope_type to 'llama3' in a copy of the file, or remove them"
        )
    return fields


def _explain(problem: Any, source: str, theirs: dict[str, str]) -> str:
    reason = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return f"{source}: {reason}"
    place = ".".join(theirs.get(str(part), str(part)) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{source} has no {place}: set it there"
    return f"{source} has {place} = {problem['input']!r}: {reason}"
