"""One file of the catalogue: TOML with readable units and sources, read into a data type in SI base units.

A number is written `{ value = "989 TFLOP/s", source = "datasheet" }`, where `source` names a table
`[sources.datasheet]` of the same file. Every problem of a file is reported at once, with the file and the field.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources.abc import Traversable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import ConfigError
from meshwright.hardware import quantity
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import Device, MatmulRates

_RATES = dict.fromkeys(MatmulRates.model_fields, quantity.FLOPS_PER_S)
DEVICE_UNITS: dict[str, Any] = {
    "memory_bytes": quantity.BYTES,
    "memory_bytes_per_s": quantity.BYTES_PER_S,
    "measured_memory_bytes_per_s": quantity.BYTES_PER_S,
    "context_bytes": quantity.BYTES,
    "communicator_bytes": quantity.BYTES,
    "host_launch_s": quantity.SECONDS,
    "dense_flops_per_s": _RATES,
    "measured_matmul_flops_per_s": _RATES,
    "num_sms": quantity.COUNT,
    "power_w": quantity.WATTS,
    "peak_power_w": quantity.WATTS,
    "matmul_points": {"flops_per_s": quantity.FLOPS_PER_S},
    "attention_points": {
        "forward_flops_per_s": quantity.FLOPS_PER_S,
        "backward_flops_per_s": quantity.FLOPS_PER_S,
    },
    "memory_op_points": {
        "forward_elements_per_s": quantity.ELEMENTS_PER_S,
        "backward_elements_per_s": quantity.ELEMENTS_PER_S,
    },
    "op_lines": {
        "start_s": quantity.SECONDS,
        "bytes_per_s": quantity.BYTES_PER_S,
        "flops_per_s": quantity.FLOPS_PER_S,
    },
}
"""The unit of every number of a device's file; a nested dict gives the units of a sub-table, or of each table of an
array."""
_LINK_UNITS: dict[str, Any] = {
    "bytes_per_s": quantity.BYTES_PER_S,
    "bytes_per_s_per_peer": quantity.BYTES_PER_S,
    "latency_s": quantity.SECONDS,
    "efficiency": quantity.SHARE,
    "oversubscription": quantity.FACTOR,
    "collectives": {"latency_s": quantity.SECONDS, "bytes_per_s": quantity.BYTES_PER_S},
}
CLUSTER_UNITS: dict[str, Any] = {"intra_node": _LINK_UNITS, "inter_node": _LINK_UNITS}
"""The unit of every number of a cluster's file."""


def read_device(file: Traversable, name: str) -> Device:
    """Return the device that `file` describes; raises ConfigError naming the file and every bad field."""
    values, problems = _read(file, DEVICE_UNITS)
    try:
        device = Device.from_dict({**values, "name": name})
    except ValidationError as error:
        raise _bad_file(file, [*problems, *_explain(error, Device)]) from None
    if problems:
        raise _bad_file(file, problems)
    return device


def read_cluster_values(file: Traversable) -> dict[str, Any]:
    """Return the fields of a cluster, with `device` as an unresolved name; raises ConfigError naming the file and bad
    fields.
    """
    values, problems = _read(file, CLUSTER_UNITS)
    if not isinstance(values.get("device"), str):
        problems.append('device: write the catalogue name of the device, such as device = "h100-sxm"')
    if problems:
        raise _bad_file(file, problems)
    return values


def build_cluster(file: Traversable, name: str, values: dict[str, Any], device: Device) -> Cluster:
    """Return the cluster of `values` read from `file`; raises ConfigError naming the file and every bad field."""
    try:
        return Cluster.from_dict({**values, "name": name, "device": device})
    except ValidationError as error:
        raise _bad_file(file, _explain(error, Cluster)) from None


def _read(file: Traversable, units: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the file's fields with every number converted, and what is wrong with it so far."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}): check that it exists and may be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is no TOML ({error}): correct that line") from None
    problems: list[str] = []
    sources = values.pop("sources", {})
    if "name" in values:
        problems.append("name: leave it out, the file's own name is the entry's name")
        del values["name"]
    if "source" in values:
        values["source"] = _source(values["source"], sources, "source", problems)
    return _convert(values, units, sources, "", problems), problems


def _convert(
    values: dict[str, Any], units: Mapping[str, Any], sources: dict[str, Any], path: str, problems: list[str]
) -> dict[str, Any]:
    converted = {}
    for key, value in values.items():
        field = f"{path}{key}"
        unit = units.get(key)
        if unit is None:
            converted[key] = value
        elif isinstance(value, list) and _is_nested(unit):
            converted[key] = [
                _convert(one, unit, sources, f"{field}.{index}.", problems)
                if isinstance(one, dict)
                else one  # pydantic reports the type error
                for index, one in enumerate(value)
            ]
        elif not isinstance(value, dict):
            problems.append(f'{field}: write it as {{ value = ..., source = "..." }}, not as {value!r}')
        elif _is_nested(unit):
            converted[key] = _convert(value, unit, sources, f"{field}.", problems)
        else:
            converted[key] = _figure(value, unit, sources, field, problems)
    return converted


def _is_nested(unit: Mapping[str, Any]) -> bool:
    """Return whether `unit` maps fields to units, rather than being one unit."""
    return bool(unit) and isinstance(next(iter(unit.values())), Mapping)


def _figure(
    value: dict[str, Any], unit: Mapping[str, float], sources: dict[str, Any], field: str, problems: list[str]
) -> dict[str, Any] | None:
    figure = dict(value)
    try:
        figure["value"] = quantity.parse_quantity(figure.get("value"), unit)
    except ValueError as error:
        problems.append(f"{field}: {error}")
        return None
    figure["source"] = _source(figure.get("source"), sources, field, problems)
    return None if figure["source"] is None else figure


def _source(name: Any, sources: dict[str, Any], field: str, problems: list[str]) -> dict[str, Any] | None:
    known = [f"[sources.{known}]" for known in sources]
    if isinstance(name, str) and isinstance(sources.get(name), dict):
        return dict(sources[name])
    problems.append(
        f"{field}: source = {name!r} names no table of this file "
        f"({', '.join(known) or 'it has no [sources.NAME] yet'}): every number says where it comes from"
    )
    return None


def _bad_file(file: Traversable, problems: list[str]) -> ConfigError:
    return ConfigError("\n".join(f"{file}: {problem}" for problem in dict.fromkeys(problems)))


def _explain(error: ValidationError, data_type: type[Device] | type[Cluster]) -> list[str]:
    return [_explain_one(details, data_type) for details in error.errors()]


def _explain_one(details: ErrorDetails, data_type: type[Device] | type[Cluster]) -> str:
    field = ".".join(str(part) for part in details["loc"])
    if details["type"] == "missing":
        return f"{field}: is missing: add it"
    if details["type"] == "extra_forbidden":
        names = {*data_type.model_fields, *Link.model_fields, *MatmulRates.model_fields} - {"name"}
        nearest = get_close_matches(str(details["loc"][-1]), sorted(names), n=1)
        return f"{field}: there is no such field" + (f": did you mean {nearest[0]}?" if nearest else ": remove it")
    if details["type"] == "value_error":
        return f"{field}: {details['ctx']['error']}" if field else str(details["ctx"]["error"])
    return f"{field}: {details['msg']}, not {details['input']!r}"
