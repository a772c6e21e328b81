"""Family: what a model_type of a Hugging Face config.json says, and what holds for all of them; RoPE both ways.

rope_from_hf and rope_to_hf: the rotary embedding of a Hugging Face config.json, both ways.
Reads both spellings: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5). Writes the
older one, which both versions and the inference engines understand.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.model.architecture import GPT2Architecture, LlamaArchitecture
from meshwright.spec.model.moe_architecture import MoEArchitecture

WIDTH_OF_HEADS = "hidden_size / num_attention_heads"
"""Marks the default that is computed."""
ELSEWHERE = "choose another model.source, or bring the model as my_module:MyModel"
"""What a user can do about a model that is not computed here."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type."""

    title: str
    """Beginning of its class names in transformers."""
    architecture: type[LlamaArchitecture]
    """Our class."""
    sizes: Mapping[str, str]
    """Keys that every config must have, all whole numbers above 0 -> our fields."""
    optional: Mapping[str, str]
    """Keys for which transformers has a default -> our fields."""
    only: Mapping[str, Any]
    """Keys that would change the model, with the one value that leaves it as ours is; ONLY holds for all families."""
    written: Mapping[str, Any]
    """Keys that an export adds; in the file those that are null, like `only`'s, are listed as `null`."""
    defaults: Mapping[str, Any]
    """Our fields where the key is absent."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Our fields that the model_type alone decides."""
    model_class: str = "ForCausalLM"
    """End of the name of its class with a head for the next token."""
    harmless: tuple[str, ...] = ()
    """Keys of this family that do not change the logits; HARMLESS holds for all families."""
    has_window_switch: bool = False
    """Whether sliding_window counts where use_sliding_window is true."""
    rope_types: tuple[str, ...] = ("default", "llama3")
    """The stretches of RoPE that are computed; none where the model has no RoPE."""
    dropouts: tuple[str, ...] = ()
    """Keys of dropout rates, which are read but not applied; other families have attention_dropout, which must be 0."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of a key -> the one in this table."""


_ARCHITECTURES = {kind.__name__: kind for kind in (LlamaArchitecture, GPT2Architecture, MoEArchitecture)}
_TABLES = tomllib.loads(Path(__file__).with_name("hf_families.toml").read_text(encoding="utf-8"))
_ALL = _TABLES.pop("all")
ONLY: dict[str, Any] = _ALL["only"]
HARMLESS: frozenset[str] = frozenset(_ALL["harmless"])


def _family(table: dict[str, Any]) -> Family:
    """Return the family of a table, with the keys of sizes that all families have unless it names all of its own."""
    fields: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in table.items()}
    fields["architecture"] = _ARCHITECTURES[table.get("architecture", "LlamaArchitecture")]
    null = dict.fromkeys(fields.pop("null", ()))
    for part in ("only", "written"):
        fields[part] = {**table.get(part, {}), **null}
    shared = {} if fields.pop("names_all", False) else _ALL
    for part in ("sizes", "optional"):
        names = {**shared.get(part, {}), **table.get(part, {})}
        # A key that does not change the logits gives none of our fields.
        fields[part] = {theirs: ours for theirs, ours in names.items() if theirs not in table.get("harmless", ())}
    return Family(**fields)


FAMILIES = {name: _family(table) for name, table in _TABLES.items()}
"""By model_type."""
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}


def rope_from_hf(config: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """Return rope_theta and rope_scaling or yarn, as fields of an architecture that are still to be checked."""
    rope = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, dict):
            raise ConfigError(f"{source} has {key} = {config[key]!r} where an object was expected: correct it there")
        rope |= config.get(key) or {}
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


def rope_to_hf(architecture: LlamaArchitecture) -> dict[str, Any]:
    """Return rope_theta and rope_scaling."""
    scaling: dict[str, Any] | None = None
    yarn = architecture.yarn if isinstance(architecture, MoEArchitecture) else None
    if architecture.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **architecture.rope_scaling.to_dict()}
    elif yarn is not None:
        # DeepSeek's own code reads "type".
        scaling = {"rope_type": "yarn", "type": "yarn", **yarn.to_dict()}
    if scaling is not None:
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
    if scaling.pop("attention_factor", None) is not None or not scaling.pop("truncate", True):
        raise UnsupportedError(
            f"{source} has attention_factor or truncate with its yarn, which Meshwright does not compute: {ELSEWHERE}"
        )
    if obstacle := yarn_obstacle(scaling.get("mscale"), scaling.get("mscale_all_dim")):
        raise UnsupportedError(f"{source} has {obstacle}: give both, or mscale = 1 alone, in a copy of the file")
    if "original_max_seq_len" not in scaling:
        raise ConfigError(f"{source} has yarn without original_max_position_embeddings: set it there")
    return scaling
