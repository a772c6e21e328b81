"""A file of faults, as `meshwright chaos --faults` takes it: TOML with one table for each.

[[faults]]
kind = "crash"
rank = 1
step = 12
phase = "backward"
"""

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import ConfigError
from meshwright.spec.fault import INJECTED, Fault, fault_name
from meshwright.spec.frozen import Frozen
from meshwright.units import first_of


class _Faults(Frozen):
    faults: tuple[Fault, ...] = Field(strict=False, min_length=1)


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Return the faults of a TOML file; raises ConfigError for what is none."""
    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name a TOML file of [[faults]]") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from error
    if not isinstance(record.get("faults"), list) or not record["faults"]:
        raise ConfigError(f"{path} {_found(record)}: write one or more [[faults]] tables with kind and rank")
    if others := [key for key in record if key != "faults"]:
        raise ConfigError(
            f"{path} has {_names(others)} besides [[faults]]: remove it, or write it into a [[faults]] table"
        )
    try:
        return _Faults.from_dict(record).faults
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{path}: {_problem(first, record['faults'])}") from error


def _found(record: dict[str, Any]) -> str:
    """Return what a file without faults has in their place."""
    if not record:
        return "is empty"
    if "faults" in record:
        value = record["faults"]
        return (
            "has no fault: faults = []" if value == [] else f"has {'[faults]' if isinstance(value, dict) else 'faults'}"
        )
    return f"has {_names(list(record))} and no [[faults]]"


def _names(keys: Sequence[str]) -> str:
    return first_of([repr(key) for key in keys])


def _problem(error: ErrorDetails, faults: Sequence[Any]) -> str:
    """Return what is wrong with one of the file's tables."""
    _, number, *path = error["loc"]
    assert isinstance(number, int)
    kind = faults[number].get("kind") if isinstance(faults[number], dict) else None
    key = ".".join(map(str, path))
    if not key:
        return f"{fault_name(number, kind)} = {error['input']!r}: must be a [[faults]] table with kind and rank"
    if error["type"] == "missing":
        return f"{fault_name(number, kind)}: {key} is missing: add it"
    if error["type"] == "extra_forbidden":
        close = get_close_matches(key, Fault.model_fields, n=1, cutoff=0.6)
        meant = f"did you mean {close[0]}?" if close else f"its keys are {', '.join(Fault.model_fields)}"
        return f"{fault_name(number, kind)}: a fault has no {key}: {meant}"
    rule = error["msg"]
    if key == "kind":
        rule = f"must be one of {', '.join(INJECTED)}"
    return f"{fault_name(number, kind)}: {key} = {error['input']!r}: {rule}"


def faults_text(faults: Sequence[Fault]) -> str:
    """Return faults as the text of such a file."""
    tables = tomlkit.aot()
    for fault in faults:
        tables.append(tomlkit.item({name: value for name, value in fault.to_dict().items() if value is not None}))
    document = tomlkit.document()
    document.append("faults", tables)
    return tomlkit.dumps(document)
