"""`section.key=value` from a command line, put over what the file says."""

import tomllib
from collections.abc import Sequence
from typing import Any

from meshwright.config.key_problems import KeyProblem
from meshwright.config.keys import SECTIONS, job_keys
from meshwright.config.names import advice_for_key
from meshwright.config.positions import KeyPath
from meshwright.config.write import toml_path

_REMOVED = object()


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> tuple[list[KeyPath], list[KeyProblem]]:
    """Change `values` in place; return the keys that were set and what is wrong with the rest of the overrides."""
    paths, problems = [], []
    for override in overrides:
        name, equals, text = override.partition("=")
        path = tuple(name.strip().split("."))
        problem = _form_problem(override, path, equals)
        if problem is None:
            _set(values, path, override_value(".".join(path), text.strip()))
            paths.append(path)
        else:
            problems.append(problem)
    return paths, problems


def override_value(dotted: str, text: str) -> Any:
    """Return what `text` means as the value of a key: a string key takes the text itself, others read TOML.

    `none` unsets a key that may be left out; text that is no TOML stays text, for the key's own rule to judge.
    """
    key = job_keys().get(dotted)
    if key is not None and key.is_optional and text == "none":
        return _REMOVED
    value = _toml_or_text(text)
    # A key that takes words may take numbers too: layout.reshard_after_forward = 4.
    is_meant_as_text = key is not None and key.kind == "string" and not key.accepts(value)
    return text if is_meant_as_text and not isinstance(value, str) else value


def _toml_or_text(text: str) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def _form_problem(override: str, path: KeyPath, equals: str) -> KeyProblem | None:
    dotted = ".".join(path)
    is_option = len(path) > 2 and path[0] in SECTIONS and path[1] == "options" and all(path)
    if not equals:
        text = f"{override!r} is no override: write section.key=value, such as train.steps=200"
    elif dotted in SECTIONS:
        text = f"{override!r} replaces the whole section: write {dotted}.key=value for each key"
    elif dotted not in job_keys() and not is_option:
        text = f"{toml_path(path)} is an unknown key: {advice_for_key(dotted)}"
    else:
        return None
    return KeyProblem(path, text, is_override=True)


def _set(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    *tables, name = path
    inner = values
    for table in tables:
        inner = inner.setdefault(table, {})
        if not isinstance(inner, dict):
            return  # the file says `train = 5`, which is a problem of its own
    if value is _REMOVED:
        inner.pop(name, None)
    else:
        inner[name] = value
