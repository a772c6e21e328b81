"""resolve_architecture: from what a job writes in [model] to an architecture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.errors import ConfigError
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.field_docs import field_rule
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_from_hf
from meshwright.spec.model.hf.hub_cache import hub_advice, local_path
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.problem import did_you_mean

FIELD_NAMES = {
    **dict.fromkeys(("hidden", "hidden_size", "d_model", "n_embd"), "dim"),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "layers"), "num_layers"),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "heads"), "num_heads"),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_query_groups"), "num_kv_heads"),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "hidden_dim", "n_inner"), "ffn_dim"),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), "max_seq_len"),
    "tie_word_embeddings": "tie_embeddings",
    "rms_norm_eps": "norm_eps",
}
"""What Hugging Face, torchtitan and Megatron call a field of an architecture: its name here."""


def resolve_architecture(section: ModelSection) -> LlamaArchitecture | None:
    """Return the architecture of `section` with its options applied; None where the source is my_module:MyModel.

    Raises ConfigError for an unknown preset, file or option, UnsupportedError for a config.json that is not ours.
    """
    if is_object_source(section.source):
        return None
    if section.source in PRESETS:
        architecture = PRESETS[section.source]
    elif _looks_like_path(section.source):
        architecture = architecture_from_hf(_read_config(section.source), section.source)
    else:
        raise ConfigError(
            f"model.source = {section.source!r} is no preset, no file and no my_module:MyModel"
            f"{did_you_mean(section.source, PRESETS)} (`meshwright list models` shows the presets)"
        )
    return _with_options(architecture, section)


def _looks_like_path(source: str) -> bool:
    return source.endswith(".json") or "/" in source or "\\" in source or Path(source).exists()


def _read_config(source: str) -> dict[str, Any]:
    path = local_path(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"model.source: there is no file {file}: name a config.json, the folder that holds it, or a preset "
            f"(see `meshwright list models`){hub_advice(source)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"model.source: {file} cannot be read ({error.strerror}): check its permissions") from None
    except ValueError as error:
        raise ConfigError(
            f"model.source: {file} is no JSON ({error}): name the config.json of a Hugging Face model"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"model.source: {file} holds a {type(config).__name__} where an object was expected: "
            "name the config.json of a Hugging Face model"
        )
    return config


def _with_options(architecture: LlamaArchitecture, section: ModelSection) -> LlamaArchitecture:
    fields = list(type(architecture).model_fields)
    unknown = [
        f"model.options.{name} is no field of the architecture of {section.source!r}{_meant_field(name, fields)} "
        f"(fields: {', '.join(fields)})"
        for name in section.options
        if name not in fields
    ]
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        merged = {name: _merged(getattr(architecture, name), value) for name, value in section.options.items()}
        return architecture.replace(**merged)
    except ValidationError as error:
        problems = [_explain(problem, section.source, architecture) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None


def _meant_field(name: str, fields: Sequence[str]) -> str:
    """Return ": did you mean x?" with the field that other libraries call `name`, or one that is spelt like it."""
    meant = FIELD_NAMES.get(name)
    return f": did you mean {meant}?" if meant in fields else did_you_mean(name, fields)


def _merged(current: Any, value: Any) -> Any:
    """Return a part of the architecture with the given fields of it changed; anything else is replaced whole."""
    return {**current.to_dict(), **value} if isinstance(current, Frozen) and isinstance(value, dict) else value


def _explain(problem: Any, source: str, architecture: LlamaArchitecture) -> str:
    reason = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return f"model.options do not fit {source!r}: {reason}"
    place = "model.options." + ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{place} is missing"
    given, rule = f"{place} = {problem['input']!r}", field_rule(type(architecture), problem["loc"])
    if problem["type"] == "value_error" or rule is None:
        return f"{given}: {reason}"
    return f"{given} must be {rule}: change it, or leave it out for what {source!r} has"
