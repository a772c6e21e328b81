"""Overrides, and what is wrong with keys and values, in our own words: value given, rule broken, what to write."""

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from meshwright.config.keys import SECTIONS, Key, job_keys, section_meaning
from meshwright.config.names import advice_for_key, meant_section
from meshwright.config.positions import KeyPath
from meshwright.config.write import shown, toml_path
from meshwright.spec.job.field_docs import field_rule
from meshwright.spec.job.job import SCHEMA_VERSION
from meshwright.spec.job.mixture_source import MixtureSource
from meshwright.spec.job.sections import ParameterGroup
from meshwright.units import parse_count


@dataclass(frozen=True)
class KeyProblem:
    """One thing that is wrong with a job, and the key (or section) that it is about."""

    path: KeyPath
    text: str
    is_override: bool = False
    """Whether it was written on the command line and not in the file."""
    meant_section: str = ""
    """The section that an unknown one most probably means: what it says is missing there."""


_TABLES: dict[tuple[str, ...], tuple[str, type[BaseModel]]] = {
    ("optimizer", "groups"): ("group", ParameterGroup),
    ("data", "mixture"): ("table", MixtureSource),
}
"""Keys that are lists of tables, with what one of them is called."""
_LOW_PRECISION = ("float8", "fp8", "mxfp8", "float4", "fp4", "nvfp4", "mxfp4", "int8")
"""How names of formats begin that other trainers compute in."""


def problems_of(error: ValidationError, values: dict[str, Any]) -> Iterator[KeyProblem]:
    """Yield one problem, or more for an unknown section, for each thing that pydantic found in `values`."""
    # A value that may be of two kinds is refused twice, and a list once for each item.
    yield from dict.fromkeys(_problems(error, values))


def _problems(error: ValidationError, values: dict[str, Any]) -> Iterator[KeyProblem]:
    for detail in error.errors(include_url=False):
        path = tuple(str(part) for part in detail["loc"])
        value = detail["input"]
        if detail["type"] == "extra_forbidden":
            yield from _unknown(path, value)
        elif path == ("schema_version",):
            yield KeyProblem(path, _version_text(value))
        elif detail["type"] == "value_error":
            yield _broken_rule(path, value, str(detail["ctx"]["error"]))
        elif len(path) == 1:
            yield KeyProblem(path, _no_table_text(path[0], value))
        elif path[:2] in _TABLES and len(path) > 3:
            yield KeyProblem(path[:2], _table_value_text(path, detail["type"] == "missing", value))
        else:
            yield KeyProblem(path[:2], value_text(".".join(path[:2]), values[path[0]][path[1]]))


def value_text(dotted: str, value: Any) -> str:
    """Return the message for a value that its key does not allow."""
    key = job_keys()[dotted]
    text = f"{dotted} = {shown(value)} must be {key.rule}"
    if dotted == "precision.compute" and str(value).casefold().startswith(_LOW_PRECISION):
        return (
            f'{text}: float8 matmuls are precision.float8 = "tensorwise", "rowwise", "rowwise_with_gw_hp" or "mxfp8" '
            'next to precision.compute = "bfloat16"; formats of 4 bits are not built'
        )
    if dotted == "precision.float8" and str(value).casefold().endswith("fp4"):
        return (
            f"{text}: torchao 0.18 trains in NVFP4 with kernels of Blackwell alone, which it cannot emulate and whose "
            'random rounding a resume does not repeat: write precision.float8 = "mxfp8"'
        )
    repair = nearest_allowed(key, value)
    if repair is not None:
        return f"{text}: write {dotted} = {shown(repair)}"
    if key.is_optional:
        return f"{text}: change it, or leave it out"
    return f"{text}: change it, or leave it out for the default {shown(key.default)}"


def _unknown(path: KeyPath, value: Any) -> Iterator[KeyProblem]:
    if len(path) > 1 or not isinstance(value, dict):
        yield KeyProblem(path, _unknown_key_text(path, value))
        return
    (section,) = path
    meant = meant_section(section)
    known = job_keys()
    if meant is None:
        advice = f"leave it out, or use one of {', '.join(SECTIONS)}"
        yield KeyProblem(path, f"[{toml_path(path)}] is no section of a job: {advice}")
        return
    strangers = [(*path, name) for name in value if f"{meant}.{name}" not in known]
    if len(strangers) < len(value) or not value:
        text = f"[{toml_path(path)}] is no section of a job: did you mean [{meant}]?"
        yield KeyProblem(path, text, meant_section=meant)
    for stranger in strangers:
        yield KeyProblem(stranger, _unknown_key_text(stranger, value[stranger[-1]]))


def _unknown_key_text(path: KeyPath, value: Any) -> str:
    if path[:2] in _TABLES:
        word, data_type = _TABLES[path[:2]]
        names = ", ".join(data_type.model_fields)
        return f"{_table(path)} has {path[-1]} = {shown(value, 40)}, an unknown key: a {word}'s are {names}"
    dotted = ".".join(path)
    given = toml_path(path) if isinstance(value, dict) else f"{toml_path(path)} = {shown(value, 40)}"
    return f"{given} is an unknown key: {advice_for_key(dotted)}"


def _table(path: KeyPath) -> str:
    return f"{path[0]}.{path[1]}, {_TABLES[path[:2]][0]} {int(path[2]) + 1}"


def _table_value_text(path: KeyPath, is_missing: bool, value: Any) -> str:
    data_type, name = _TABLES[path[:2]][1], path[3]
    rule = field_rule(data_type, [name])
    if is_missing:
        return f"{_table(path)} has no {name}: add it; it must be {rule}"
    advice = "change it" if data_type.model_fields[name].is_required() else "change it, or leave it out"
    return f"{_table(path)}: {name} = {shown(value, 40)} must be {rule}: {advice}"


def _version_text(value: Any) -> str:
    if isinstance(value, int) and value > SCHEMA_VERSION:
        return (
            f"schema_version = {value} is a newer job format than this Meshwright knows (up to {SCHEMA_VERSION}): "
            f"install a newer Meshwright, or write the job for version {SCHEMA_VERSION}"
        )
    return value_text("schema_version", value)


def _broken_rule(path: KeyPath, value: Any, rule: str) -> KeyProblem:
    """A check of ours: on a whole section or on options its text is a message, on one value it is the rule."""
    if len(path) == 1:
        return KeyProblem(path, rule)
    if path[-1] == "options":
        return KeyProblem(path, f"{path[0]}.{rule}")
    return KeyProblem(path, value_text(".".join(path), value))


def _no_table_text(section: str, value: Any) -> str:
    return (
        f"{section} = {shown(value, 40)} is no table of keys ({section_meaning(section)}): "
        f"write a line [{section}] and its keys below it"
    )


_DIGITS = re.compile(r"\d+")
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")

_MEANT_VALUES: dict[tuple[str, Any], str] = {
    ("run.device", "gpu"): "cuda",
    ("layout.activation_checkpoint", True): "full",
    ("layout.activation_checkpoint", False): "none",
    ("layout.reshard_after_forward", True): "always",
    ("layout.reshard_after_forward", False): "never",
}


def nearest_allowed(key: Key, value: Any) -> Any | None:
    """Return an allowed value that `value` most probably means, or None when nothing is near."""
    return next((repair for repair in _repairs(key, value) if key.accepts(repair)), None)


def _repairs(key: Key, value: Any) -> Iterator[Any]:
    if isinstance(value, str | int | float) and (key.dotted, value) in _MEANT_VALUES:
        yield _MEANT_VALUES[key.dotted, value]
    if key.kind == "string":
        yield from _text_repairs(key, value)
    elif isinstance(value, str):
        yield from _repairs_of_text(value)
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        if key.kind == "integer" and value > 0 and math.isfinite(value):
            yield math.ceil(value)  # half an interval is no request for 0, which often means never
        yield from _number_repairs(value)
        if key.kind == "integer" and value < 1:
            yield from (0, abs(value), 1)


def _text_repairs(key: Key, value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.casefold()
        # float64 is no spelling of float7: numbers in a name are its meaning.
        same = [choice for choice in key.choices if _DIGITS.findall(choice) == _DIGITS.findall(value)]
        yield from get_close_matches(value.casefold(), same, n=1, cutoff=0.5)
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        yield str(value)


def _repairs_of_text(text: str) -> Iterator[Any]:
    if text.casefold() in _TRUE_WORDS:
        yield True
    if text.casefold() in _FALSE_WORDS:
        yield False
    with suppress(ValueError):
        yield parse_count(text)
    with suppress(ValueError):
        yield float(text)


def _number_repairs(value: int | float) -> Iterator[Any]:
    if value in (0, 1):
        yield bool(value)
    if value == value // 1:
        yield int(value)
    if isinstance(value, float):
        yield abs(value)
    if value == value // 1 and value > 1:
        yield float(f"{value / 100:.12g}")  # a share written in percent


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
