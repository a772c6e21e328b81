"""Devices and clusters as files of the catalogue: hardware/entry.py parses the result back to equal objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.hardware.entry import CLUSTER_UNITS, DEVICE_UNITS
from meshwright.hardware.quantity import format_quantity
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import Device


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
