"""rope_from_hf and rope_to_hf: the rotary embedding of a Hugging Face config.json, both ways.

Reads both spellings: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5). Writes the
older one, which both versions and the inference engines understand.
"""

from typing import Any

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_family import ELSEWHERE, Family
from meshwright.spec.model.moe_architecture import MoEArchitecture

ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}


def rope_from_hf(config: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """Return rope_theta and rope_scaling or yarn, as fields of an architecture that are still to be checked."""
    rope = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, dict):
            raise ConfigError(f"{source} has {key} = {config[key]!r} where an object was expected: correct it there")
        rope |= config.get(key) or {}
    if not any(config.get(key) for key in ("rope_scaling", "rope_parameters")):
        rope |= family.default_rope
    theta = rope.pop("rope_theta")
    fields: dict[str, Any] = {"rope_theta": family.defaults.get("rope_theta", 10_000.0) if theta is None else theta}
    # "type" is the older name of "rope_type"; some files have both.
    legacy_type = rope.pop("type", None)
    rope_type = rope.pop("rope_type", legacy_type) or "default"
    if rope_type not in family.rope_types:
        computed = [f"'{name}'" for name in family.rope_types]
        raise UnsupportedError(
            f"{source} has rope_type = {rope_type!r}, but Meshwright computes {', '.join(computed[:-1])} and "
            f"{computed[-1]} only: {ELSEWHERE}"
        )
    names = {"original_max_position_embeddings": "original_max_seq_len"}
    scaling = {names.get(key, key): value for key, value in rope.items() if value is not None}
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(
            f"{source} turns only a part of each head (partial_rotary_factor), which Meshwright does not compute: "
            f"{ELSEWHERE}"
        )
    if rope_type == "llama3":
        return {**fields, "rope_scaling": scaling}
    if rope_type == "yarn":
        return {**fields, "yarn": _yarn(scaling, source)}
    if scaling:
        raise UnsupportedError(
            f"{source} has {', '.join(sorted(scaling))} with the default RoPE, which takes none: "
            "set rope_type to 'llama3' in a copy of the file, or remove them"
        )
    return fields


def rope_to_hf(architecture: LlamaArchitecture, family: Family) -> dict[str, Any]:
    """Return rope_theta and rope_scaling."""
    scaling: dict[str, Any] | None = None
    yarn = architecture.yarn if isinstance(architecture, MoEArchitecture) else None
    if architecture.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **architecture.rope_scaling.to_dict()}
    elif yarn is not None:
        # DeepSeek's own code reads "type".
        scaling = {"rope_type": "yarn", "type": "yarn", **yarn.to_dict()}
        if yarn.truncate:
            del scaling["truncate"]
    if scaling is None and family.default_rope:
        scaling = {"rope_type": "default"}
    elif scaling is not None:
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
    return {"rope_theta": architecture.rope_theta, "rope_scaling": scaling}


def yarn_obstacle(mscale: float | None, mscale_all_dim: float | None) -> str | None:
    """Return why transformers and we would scale cosines differently with these two, None where they agree.

    Where either is absent or 0, transformers takes mscale for 1 and mscale_all_dim for 0 in their quotient.
    """
    if (mscale and mscale_all_dim) or (mscale in (None, 1.0) and not mscale_all_dim):
        return None
    return f"mscale = {mscale} with mscale_all_dim = {mscale_all_dim}, which implementations understand differently"


def _yarn(scaling: dict[str, Any], source: str) -> dict[str, Any]:
    if scaling.pop("attention_factor", None) is not None:
        raise UnsupportedError(
            f"{source} has attention_factor with its yarn, which Meshwright does not compute: {ELSEWHERE}"
        )
    if obstacle := yarn_obstacle(scaling.get("mscale"), scaling.get("mscale_all_dim")):
        raise UnsupportedError(f"{source} has {obstacle}: give both, or mscale = 1 alone, in a copy of the file")
    if "original_max_seq_len" not in scaling:
        raise ConfigError(f"{source} has yarn without original_max_position_embeddings: set it there")
    return scaling
