"""architecture_from_hf and architecture_to_hf: a Hugging Face config.json of a known family, both ways.

What changes the function that the model computes is either understood or refused by name; what does not is listed. The
names are defined in spec/model/hf/hf_families.py.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.job.field_docs import field_rule
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.gpt_oss_architecture import GptOssArchitecture
from meshwright.spec.model.hf.hf_families import ALIASES, FAMILIES
from meshwright.spec.model.hf.hf_family import ELSEWHERE, WIDTH_OF_HEADS, Family
from meshwright.spec.model.hf.hf_keys import refuse_unsupported, require_sizes, unknown_keys
from meshwright.spec.model.hf.hf_layers import layers_from_hf, layers_to_hf, window_obstacles
from meshwright.spec.model.hf.hf_rope import rope_from_hf, rope_to_hf, yarn_obstacle
from meshwright.spec.model.moe_architecture import MoEArchitecture

_GPT2_DROPOUT = 0.1
"""That of transformers' GPT2Config where a rate is absent."""


def architecture_from_hf(config: dict[str, Any], source: str = "config.json") -> LlamaArchitecture:
    """Return the architecture that `config` describes; `source` names it in errors.

    Raises UnsupportedError for a model or an attribute that Meshwright does not compute, ConfigError for a broken file.
    """
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        *others, last = FAMILIES
        raise UnsupportedError(
            f"{source} has model_type = {config.get('model_type')!r}, but Meshwright reads {', '.join(others)} and "
            f"{last} only: {ELSEWHERE}"
        )
    family = FAMILIES[model_type]
    written = {ALIASES.get(model_type, {}).get(key, key): key for key in config}
    config = {key: config[own] for key, own in written.items()}
    refuse_unsupported(config, family, source)
    require_sizes(config, written, family, source)
    fields = {ours: config[theirs] for theirs, ours in family.sizes.items()}
    fields |= _defaults(config, family, fields, source)
    fields |= {ours: config[theirs] for theirs, ours in family.optional.items() if config.get(theirs) is not None}
    fields |= {**family.implied, **_derived(config, model_type, source)}
    fields |= layers_from_hf(config, family, fields["num_layers"], source)
    fields |= rope_from_hf(config, family, source) if family.rope_types else {}
    try:
        return family.architecture.from_dict(_nested(fields))
    except ValidationError as error:
        theirs = {ours: written.get(key, key) for key, ours in {**family.sizes, **family.optional}.items()}
        # Of a part, the messages of an architecture name some fields without it.
        theirs |= {ours.rpartition(".")[2]: key for ours, key in theirs.items()}
        problems = [_explain(problem, source, theirs, family.architecture) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None


def unknown_keys_of(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config of a known family for which `architecture_from_hf` refuses it as unknown."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        return []
    aliases = ALIASES.get(model_type, {})
    return [key for key in unknown_keys(config, FAMILIES[model_type]) if key not in aliases]


def architecture_to_hf(architecture: LlamaArchitecture) -> dict[str, Any]:
    """Return the config that transformers 4 and 5 read as `architecture`; token ids and dtype are the caller's to add.

    Raises UnsupportedError for a mixture of experts that no family of transformers computes.
    """
    model_type = hf_model_type(architecture)
    family = FAMILIES[model_type]
    if obstacles := hf_obstacles(architecture):
        raise UnsupportedError(
            f"no model of transformers computes this one; {family.title} comes nearest, but does not have "
            f"{'; nor '.join(obstacles)}: change that, or read the tensors with meshwright.checkpoint.checkpoint"
        )
    keys = {**family.sizes, **family.optional}
    special: dict[str, Any] = {}
    if model_type == "qwen3_moe":
        assert isinstance(architecture, MoEArchitecture)
        special["mlp_only_layers"] = list(range(architecture.num_dense_layers))
    return {
        "architectures": [f"{family.title}{family.model_class}"],
        "model_type": model_type,
        **{theirs: _get(architecture, ours) for theirs, ours in keys.items()},
        **({**rope_to_hf(architecture, family), "hidden_act": "silu"} if family.rope_types else {}),
        **dict.fromkeys(family.dropouts, getattr(architecture, "dropout", 0.0)),
        **family.written,
        **layers_to_hf(architecture, family),
        **special,
    }


def hf_model_type(architecture: LlamaArchitecture) -> str:
    """Return the family of transformers that computes `architecture`, or comes nearest to it."""
    if isinstance(architecture, GPT2Architecture):
        return "gpt2"
    if not isinstance(architecture, MoEArchitecture):
        if architecture.qk_norm:
            return "qwen3"
        if architecture.qkv_bias:
            return "qwen2"
        return "mistral" if architecture.sliding_window else "llama"
    if isinstance(architecture, GptOssArchitecture):
        return "gpt_oss"
    if architecture.latent is not None:
        return "deepseek_v3"
    return "qwen3_moe" if architecture.qk_norm else "mixtral"


def hf_obstacles(architecture: LlamaArchitecture) -> list[str]:
    """Return the fields, with their values, in which `architecture` differs from all that its family can be."""
    family = FAMILIES[hf_model_type(architecture)]
    unlike = window_obstacles(architecture, family)
    unlike += ["qkv_bias"] if architecture.qkv_bias and not family.implied.get("qkv_bias") else []
    if isinstance(architecture, GPT2Architecture) and architecture.attention_dim != architecture.dim:
        unlike.append("head_dim")
    if not isinstance(architecture, MoEArchitecture):
        return [f"{name} = {_get(architecture, name)}" for name in unlike]
    router = architecture.router
    wrong = unlike + [name for name, value in family.implied.items() if _get(architecture, name) != value]
    # The rate itself is not in a config, only that there is a bias.
    wrong = [name for name in wrong if name != "router.bias_update_rate" or not router.bias_update_rate]
    if architecture.latent is None:
        wrong += ["router.bias_update_rate"] if router.bias_update_rate else []
        wrong += ["router.groups_per_token"] if router.groups_per_token < router.num_groups else []
    else:
        wrong += ["router.num_groups"] if architecture.num_experts == router.num_groups > 1 else []
        wrong += ["num_shared_experts"] if not architecture.num_shared_experts else []
    obstacles = [f"{name} = {_get(architecture, name)}" for name in wrong]
    yarn = architecture.yarn
    obstacle = None if yarn is None else yarn_obstacle(yarn.mscale, yarn.mscale_all_dim)
    return obstacles if obstacle is None else [*obstacles, obstacle]


def _defaults(config: dict[str, Any], family: Family, sizes: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the fields that an absent key leaves; `sizes` are those that every config has."""
    heads, width = sizes["num_heads"], sizes["dim"]
    defaults = {"num_kv_heads": heads, **family.defaults}
    # For these transformers distinguishes null from absent.
    if "num_key_value_heads" in config:
        defaults["num_kv_heads"] = heads
    if "q_lora_rank" in config:
        defaults.pop("latent.query_rank", None)
    if defaults.get("head_dim") == WIDTH_OF_HEADS:
        if config.get("head_dim") is None and width % heads:
            theirs = {ours: key for key, ours in family.sizes.items()}
            raise ConfigError(
                f"{source} has no head_dim, and {theirs['dim']} = {width} does not divide by {theirs['num_heads']} = "
                f"{heads}: {'set head_dim, or ' if 'head_dim' in family.optional else ''}make them divide"
            )
        defaults["head_dim"] = width // heads
    return defaults


def _derived(config: dict[str, Any], model_type: str, source: str) -> dict[str, Any]:
    """Return the fields that no single key gives."""
    if model_type == "deepseek_v3":
        return {"head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}
    if model_type == "gpt2":
        rates = {"dropout": max(config.get(key, _GPT2_DROPOUT) for key in FAMILIES[model_type].dropouts)}
        return rates if config.get("n_inner") is not None else {**rates, "ffn_dim": 4 * config["n_embd"]}
    if model_type in ("mixtral", "gpt_oss"):
        return {"ffn_dim": config["intermediate_size"]}
    if model_type == "qwen3_moe":
        dense = sorted(config.get("mlp_only_layers") or ())
        if dense != list(range(len(dense))):
            raise UnsupportedError(
                f"{source} has mlp_only_layers = {dense}, but Meshwright computes models whose first layers are the "
                f"dense ones: {ELSEWHERE}"
            )
        return {"num_dense_layers": len(dense)}
    return {}


def _get(architecture: LlamaArchitecture, dotted: str) -> Any:
    value: Any = architecture
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Return {"a.b": 1} as {"a": {"b": 1}}."""
    nested: dict[str, Any] = {}
    for dotted, value in fields.items():
        *parts, name = dotted.split(".")
        place = nested
        for part in parts:
            place = place.setdefault(part, {})
        place[name] = value
    return nested


def _explain(problem: Any, source: str, theirs: dict[str, str], architecture: type[LlamaArchitecture]) -> str:
    """Return what is wrong with a config in the words of its file: `theirs` has its key for each field of ours."""
    reason = problem["msg"].removeprefix("Value error, ")
    place = ".".join(str(part) for part in problem["loc"])
    place = theirs.get(place, place)
    if not place:
        return f"{source}: {re.sub(r'[a-z_.]*[a-z]', lambda word: theirs.get(word[0], word[0]), reason)}"
    # The stretch of RoPE keeps our names of its parts, but for this one.
    place = place.replace("original_max_seq_len", "original_max_position_embeddings").replace("yarn", "rope_scaling")
    if problem["type"] == "missing":
        return f"{source} has no {place}: set it there"
    given, rule = f"{source} has {place} = {json.dumps(problem['input'])}", field_rule(architecture, problem["loc"])
    if problem["type"] == "value_error" or rule is None:
        return f"{given}: {reason}"
    return f"{given}, which must be {rule}: correct it"
