"""What is asked of the keys of a config.json: sizes that are there, and nothing that would change the model unseen."""

import json
from collections.abc import Mapping
from typing import Any

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.model.hf.hf_family import ELSEWHERE, HARMLESS, ONLY, Family
from meshwright.spec.model.hf.hf_quantization import QUANTIZATION, require_readable
from meshwright.spec.model.hf.hf_rope import ROPE_KEYS

_EMPTY: tuple[Any, ...] = (None, "", [], {})


def require_sizes(config: dict[str, Any], written: dict[str, str], family: Family, source: str) -> None:
    """Raise ConfigError for a size that every config of the family has and this one has not, or not as a size."""
    absent = [key for key in family.sizes if key not in config]
    wrong = [key for key in family.sizes if key in config and (type(config[key]) is not int or config[key] < 1)]
    problems = []
    if absent:
        problems.append(
            f"{source} has no {', '.join(absent)}, which every {config['model_type']} config has: "
            "take the whole config.json of the model"
        )
    problems += [
        f"{source} has {written[key]} = {json.dumps(config[key])}, which must be a whole number, 1 or more: correct it"
        for key in wrong
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def refuse_unsupported(config: dict[str, Any], family: Family, source: str) -> None:
    """Raise UnsupportedError for a key that changes the model, or may, in a way that Meshwright does not compute."""
    require_readable(config, source)
    only = {**ONLY, **family.only}
    if family.has_window_switch:
        only.pop("use_sliding_window")
    for key, allowed in only.items():
        if config.get(key, allowed) != allowed:
            raise UnsupportedError(
                f"{source} has {key} = {config[key]!r}, which Meshwright does not compute: it would have to be "
                f"{allowed!r}; {ELSEWHERE}"
            )
    if unknown := unknown_keys(config, family):
        raise UnsupportedError(
            f"{source} has {', '.join(unknown)}, of which Meshwright does not know whether the model changes with it: "
            "if it does not, remove it from a copy of the file and name the copy (model.source of a job, --config of "
            "`meshwright import`)"
        )


def unknown_keys(config: Mapping[str, Any], family: Family) -> list[str]:
    """Return the keys, sorted, of which it is not known whether the model changes with them.

    One that is null or empty says nothing. One that is false may switch off what is on without it.
    """
    of_family = {*family.sizes, *family.optional, *family.dropouts, *family.only, *family.harmless}
    known = {*of_family, *ONLY, *ROPE_KEYS, *HARMLESS, QUANTIZATION}
    given = [key for key in config if key not in known and not key.startswith("_")]
    return sorted(key for key in given if config[key] not in _EMPTY)
