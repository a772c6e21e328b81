"""A layout in one word, as it stands on a command line and in a table: `dp_shard=2,tp=2,schedule=GPipe`."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from meshwright.errors import ConfigError
from meshwright.spec.layout.layout import Layout

_PLAIN = "dp_shard=1"
"""What the layout of one rank is called, where nothing differs from the defaults."""
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_IN_LIST = ";"


def layout_text(layout: Layout) -> str:
    """Return what differs from the defaults as `key=value,...`; `parse_layout` reads it back."""
    pairs = [
        f"{name}={_value_text(value)}"
        for name, field in Layout.model_fields.items()
        if (value := getattr(layout, name)) != field.default
    ]
    return ",".join(pairs) or _PLAIN


def parse_layout(text: str) -> Layout:
    """Return the layout that `key=value,...` describes, other keys at their defaults; raises ConfigError."""
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name or not value:
            raise ConfigError(f"layout {text!r}: {pair.strip()!r} must be key=value, such as dp_shard=2,tp=2")
        if name not in Layout.model_fields:
            advice = "give keys of [layout] alone" if "." in name else f"did you mean {_meant_keys(name)}?"
            raise ConfigError(f"layout {text!r}: unknown key {name}: {advice}")
        if name in values:
            raise ConfigError(f"layout {text!r}: {name} is given twice: write it once")
        values[name] = _value(name, value)
    try:
        return Layout.model_validate(values)
    except ValidationError as error:
        wrong = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
        raise ConfigError("\n".join(f"layout {text!r}: {_advice(name, values[name])}" for name in wrong)) from None


def checkpoint_words(blocks: Sequence[str]) -> str:
    """Return what blocks save, those that follow each other and do the same as one: `5 full, 3 none`."""
    return ", ".join(f"{len([*same])} {kind}" for kind, same in groupby(blocks))


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _IN_LIST.join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(name: str, text: str) -> Any:
    """Return what `text` means as a value of the key `name`; what is no value of it is left to the key's own rule."""
    kinds = _kinds(name)
    if text == "none" and any(kind["type"] == "null" for kind in kinds):
        return None
    if any(kind["type"] == "array" for kind in kinds):
        items = text.split(_IN_LIST)
        return tuple(int(item) if _WHOLE_NUMBER.fullmatch(item.strip()) else item for item in items)
    if any(kind["type"] == "boolean" for kind in kinds) and text in ("true", "false"):
        return text == "true"
    is_number = any(kind["type"] == "integer" for kind in kinds) and _WHOLE_NUMBER.fullmatch(text)
    return int(text) if is_number else text


@cache
def _kinds(name: str) -> list[dict[str, Any]]:
    """Return the JSON Schemas of what a value of the key `name` may be."""
    schema = Layout.model_json_schema()["properties"][name]
    kinds: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return kinds


def _meant_keys(name: str) -> str:
    longer = [key for key in Layout.model_fields if key.startswith(f"{name}_")]
    return " or ".join(longer or get_close_matches(name.casefold(), Layout.model_fields, n=1, cutoff=0.0))


def _advice(name: str, value: Any) -> str:
    """Return the rule of the key `name` and a value that it allows, the nearest where words are compared."""
    kinds = [kind for kind in _kinds(name) if kind["type"] != "null"]
    rule = " or ".join(_rule(kind) for kind in kinds)
    if "enum" in kinds[0]:
        example = get_close_matches(str(value).casefold(), kinds[0]["enum"], n=1, cutoff=0.0)[0]
    else:
        items = _IN_LIST.join(kinds[0].get("items", {}).get("enum", ["1", "2"])[:2])
        example = {"integer": "1", "boolean": "true", "array": items}[kinds[0]["type"]]
    return f"{name}={_value_text(value)} must be {rule}: write {name}={example}, for one"


def _rule(kind: dict[str, Any]) -> str:
    if "enum" in kind:
        return " or ".join(kind["enum"])
    if "enum" in kind.get("items", {}):
        return f"{' or '.join(kind['items']['enum'])} for each block, with {_IN_LIST} between them"
    if kind["type"] == "array":
        return f"whole numbers, 0 or more, with {_IN_LIST} between them"
    at_least = kind.get("minimum", kind.get("exclusiveMinimum", 0) + 1)
    return "true or false" if kind["type"] == "boolean" else f"a whole number, {at_least} or more"
