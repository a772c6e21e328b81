"""Values as they are written in a job file: for messages, tables and job files themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.items import Item


def toml_value(value: Any) -> str:
    """Return one line of TOML for a value that TOML knows: `"full"`, `[0.9, 0.95]`, `{ num_layers = 2 }`."""
    match value:
        case Mapping():
            inner = ", ".join(f"{toml_key(name)} = {toml_value(each)}" for name, each in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case str() | bool():
            return _item(value).as_string()
        case Sequence():
            return f"[{', '.join(toml_value(each) for each in value)}]"
        case int() if abs(value) >= 100_000:
            return f"{value:_}"
        case _:
            return _item(value).as_string()


def toml_key(name: str) -> str:
    """Return `name` as a key of TOML, quoted where it has to be."""
    return tomlkit.key(name).as_string()


def toml_path(path: Sequence[str]) -> str:
    """Return a dotted key: `model.options."my key"`."""
    return ".".join(toml_key(name) for name in path)


def shown(value: Any, width: int = 60) -> str:
    """Return a value for a message: as TOML, cut to `width` characters; none where there is none."""
    if value is None:
        return "none"
    text = toml_value(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _item(value: Any) -> Item:
    item: Item = tomlkit.item(value)
    return item
