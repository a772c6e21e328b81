"""One file of the catalogue: TOML with readable units and sources, read into a data type in SI base units, or written.

A number is written `{ value = "989 TFLOP/s", source = "datasheet" }`, where `source` names a table
`[sources.datasheet]` of the same file. Every problem of a file is reported at once, with the file and the field.
"""

import json
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources.abc import Traversable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import ConfigError
from meshwright.hardware import quantity
from meshwright.hardware.quantity import format_quantity
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
    "calibration_error": quantity.SHARE,
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
        cluster = Cluster.from_dict({**values, "name": name, "device": device})
    except ValidationError as error:
        raise _bad_file(file, _explain(error, Cluster)) from None
    # This machine has none before it is calibrated, so that Cluster allows it.
    if cluster.domain_size > 1 and cluster.intra_node is None:
        problem = f"intra_node: is missing: add [intra_node], what joins the {cluster.domain_size} devices of a node"
        raise _bad_file(file, [problem])
    return cluster


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


def device_toml(device: Device) -> str:
    """Return the file that describes `device`; its name is the file's own."""
    values = _without_unset(device.to_dict())
    del values["name"]
    return _Writer(DEVICE_UNITS).file(values)


def cluster_toml(cluster: Cluster) -> str:
    """Return the file that describes `cluster`; its device is named, and needs a file of its own."""
    values = _without_unset(cluster.to_dict())
    del values["name"]
    values["device"] = cluster.device.name
    return _Writer(CLUSTER_UNITS).file(values)


class _Writer:
    """Writes one file, collecting the sources that its figures name."""

    def __init__(self, units: Mapping[str, Any]) -> None:
        self._units = units
        self._sources: dict[str, dict[str, Any]] = {}

    def file(self, values: dict[str, Any]) -> str:
        if "source" in values:
            values["source"] = self._name_of(values["source"])
        lines = self._table(values, self._units, ())
        for name, source in self._sources.items():
            lines += ["", f"[sources.{name}]", *(f"{key} = {_plain(value)}" for key, value in source.items())]
        return "\n".join(lines) + "\n"

    def _table(self, values: dict[str, Any], units: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
        """Return the lines of a table: its own keys, then its tables, then its lists of tables, as TOML wants them."""
        lines = [f"{key} = {self._value(value, units.get(key))}" for key, value in values.items() if _is_line(value)]
        for key, value in values.items():
            here = (*path, key)
            if _is_table(value):
                lines += ["", f"[{'.'.join(here)}]", *self._table(value, units.get(key, {}), here)]
            elif _is_list_of_tables(value):
                for one in value:
                    lines += ["", f"[[{'.'.join(here)}]]", *self._table(one, units.get(key, {}), here)]
        return lines

    def _value(self, value: Any, unit: Any) -> str:
        if not _is_figure(value):
            return _plain(value)
        text = format_quantity(value["value"], unit)
        fields = {"value": text, "source": self._name_of(value["source"])}
        if "note" in value:
            fields["note"] = value["note"]
        return f"{{ {', '.join(f'{key} = {_plain(field)}' for key, field in fields.items())} }}"

    def _name_of(self, source: dict[str, Any]) -> str:
        """Return the source's name in this file: its kind, numbered from the second of a kind on."""
        for name, known in self._sources.items():
            if known == source:
                return name
        number = 1 + sum(known["kind"] == source["kind"] for known in self._sources.values())
        name = source["kind"] if number == 1 else f"{source['kind']}_{number}"
        self._sources[name] = source
        return name


def _without_unset(value: Any) -> Any:
    """Return plain values without what is None or empty: a file leaves out what is not known."""
    if isinstance(value, dict):
        kept = {key: _without_unset(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one is not None and one != [] and one != {}}
    return [_without_unset(one) for one in value] if isinstance(value, list) else value


def _is_figure(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= {"value", "source", "note"}


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and not _is_figure(value)


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _is_line(value: Any) -> bool:
    return not _is_table(value) and not _is_list_of_tables(value)


def _plain(value: Any) -> str:
    # JSON's strings, numbers, booleans and lists of them are TOML's too.
    return json.dumps(value, ensure_ascii=False)
