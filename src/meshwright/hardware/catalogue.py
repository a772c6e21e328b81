"""The catalogue: devices and clusters by name, ours and the user's own.

Ours ship with the package (`hardware/devices/NAME.toml`, `hardware/clusters/NAME.toml`). The user's lie in folders
`devices/` and `clusters/` of the folder that MESHWRIGHT_CATALOGUE names, or else of ~/.config/meshwright; an entry
there with the name of one of ours replaces it, and a line in the log says so.
"""

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import ConfigError
from meshwright.hardware.entry import build_cluster, read_cluster_values, read_device
from meshwright.hardware.machine import num_usable_cores, usable_memory_bytes
from meshwright.log import logger
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import NAME_PATTERN, Device, Figure, Source
from meshwright.spec.problem import nearest_name

CATALOGUE_VARIABLE = "MESHWRIGHT_CATALOGUE"
LOCAL = "local"
"""This machine as the operating system describes it, for runs on its processors over gloo."""
UNMEASURED = "cpu"
"""The device of "local" without a calibration."""
CALIBRATED = "cpu-local"
"""What `meshwright calibrate` calls this machine's processor; the file shipped under this name is an example that
`meshwright calibrate` overrides."""
Kind = Literal["devices", "clusters"]


@dataclass(frozen=True)
class Entry:
    """One file of the catalogue."""

    name: str
    """The file's name without .toml."""
    file: Traversable
    """Where it lies."""
    is_ours: bool
    """Whether it ships with the package."""
    replaces_ours: bool = False
    """Whether it is the user's and replaces one of ours."""

    @property
    def unchecked(self) -> dict[str, Any]:
        """Return what the file says; nothing if it is no TOML. What is chosen by it is loaded, and checked, later."""
        try:
            return _parsed(self.file.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
            return {}


# The whole catalogue is looked through for each name: half a second.
_parsed = lru_cache(maxsize=512)(tomllib.loads)


def user_folder() -> Path:
    """Return the folder of the user's own entries, whether it exists or not."""
    chosen = os.environ.get(CATALOGUE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "meshwright"


def entries(kind: Kind) -> dict[str, Entry]:
    """Return every entry of `kind` by name, sorted by name; a user's entry overrides a shipped one.

    No file is read, and a user's may have a name that is none: loading it says so.
    """
    ours = {
        file.name.removesuffix(".toml"): file
        for file in (files("meshwright.hardware") / kind).iterdir()
        if file.name.endswith(".toml")
    }
    found = {name: Entry(name, file, is_ours=True) for name, file in ours.items()}
    for name, file in _user_files(kind):
        found[name] = Entry(name, file, is_ours=False, replaces_ours=name in ours)
    return dict(sorted(found.items()))


def device_names() -> list[str]:
    """Return the names that cluster.device and load_device understand."""
    return list(entries("devices"))


def cluster_names() -> list[str]:
    """Return the names that cluster.name and load_cluster understand; "local" is this machine."""
    return [LOCAL, *entries("clusters")]


def load_device(name: str) -> Device:
    """Return the device called `name`, in whatever case; raises ConfigError naming the nearest one, or an invalid
    file.
    """
    found = entries("devices")
    return _read_device(found, name.lower())


def load_cluster(name: str) -> Cluster:
    """Return the cluster called `name`, in whatever case; raises ConfigError naming the nearest one, or a bad field.

    "local" is this machine: as `meshwright calibrate` has measured it, or else as the operating system describes it.
    """
    name, found = name.lower(), entries("clusters")
    if name == LOCAL:
        is_measured = CALIBRATED in found and not found[CALIBRATED].is_ours
        return load_cluster(CALIBRATED).replace(name=LOCAL) if is_measured else local_cluster()
    if name not in found:
        raise _unknown("clusters", name, [LOCAL, *found])
    entry = found[name]
    _use(entry, "cluster")
    values = read_cluster_values(entry.file)
    devices = entries("devices")
    if values["device"] not in devices:
        raise ConfigError(f"{entry.file}: device: {_unknown('devices', values['device'], list(devices))}")
    return build_cluster(entry.file, name, values, _read_device(devices, values["device"]))


def with_example_rates(cluster: Cluster) -> Cluster:
    """Return `cluster`, an uncalibrated local machine with the shipped example's rates filled in.

    A line in the log says so.
    """
    if cluster.device.name != UNMEASURED:
        return cluster
    example = load_cluster(CALIBRATED)
    logger.warning(
        "this machine is not calibrated: its step is predicted with the rates of an example, %s; "
        "measured steps may be 3 times as long; `meshwright calibrate` measures yours",
        example.device.title,
    )
    memory = cluster.device.memory_bytes
    share = memory.replace(value=memory.value / cluster.num_devices, note="this rank's share of the machine's memory")
    return example.replace(
        name=cluster.name,
        device=example.device.replace(memory_bytes=share),
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
    )


def example_of(device: Device) -> str | None:
    """Return the title of the machine of the shipped example calibration; None for another device."""
    is_example = device.name == CALIBRATED and entries("devices")[CALIBRATED].is_ours
    return device.title if is_example else None


def recognise_device(torch_device_name: str) -> Device | None:
    """Return the device that torch.cuda.get_device_name() calls `torch_device_name`; None if it is not listed."""
    wanted = _normalise(torch_device_name)
    found = entries("devices")
    for entry in sorted(found.values(), key=lambda entry: entry.is_ours):
        if wanted in {_normalise(alias) for alias in names_in(entry, "aliases")}:
            return _read_device(found, entry.name)
    return None


def names_in(entry: Entry, key: str) -> list[str]:
    """Return the names that an entry's file lists as `key`, leaving out what is none."""
    names = entry.unchecked.get(key)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _read_device(found: dict[str, Entry], name: str) -> Device:
    if name not in found:
        raise _unknown("devices", name, list(found))
    _use(found[name], "device")
    return read_device(found[name].file, name)


def _use(entry: Entry, kind: str) -> None:
    """Log that the user's entry replaces one of ours; raises ConfigError for a file name that is no name."""
    if not entry.is_ours and not re.match(NAME_PATTERN, stem := entry.file.name.removesuffix(".toml")):
        raise ConfigError(
            f"{entry.file}: {stem!r} is no catalogue name: "
            "rename the file to lower-case letters, digits, dots and dashes"
        )
    # The shipped one of that name is an example, meant to be replaced.
    if entry.replaces_ours and entry.name != CALIBRATED:
        logger.warning("%s %s: your %s replaces the one that ships with meshwright", kind, entry.name, entry.file)


def _unknown(kind: Kind, name: str, names: list[str]) -> ConfigError:
    nearest = nearest_name(name, names)
    return ConfigError(
        f"{name!r} must be one of the {len(names)} {kind} of the catalogue: "
        + (f"did you mean {nearest!r}? " if nearest else "")
        + f"`meshwright list {kind}` shows them all; your own go to {user_folder() / kind}/NAME.toml"
    )


def _user_files(kind: Kind) -> Iterator[tuple[str, Path]]:
    folder = user_folder()
    if os.environ.get(CATALOGUE_VARIABLE) and not folder.is_dir():
        raise ConfigError(
            f"{CATALOGUE_VARIABLE} = {str(folder)!r} is no folder: "
            "name one that holds devices/ or clusters/, or unset it"
        )
    for file in sorted((folder / kind).glob("*.toml")):
        yield file.stem.lower(), file


def _normalise(device_name: str) -> str:
    """Return the name without what varies between driver releases: the maker's words, case and punctuation."""
    words = re.findall(r"[a-z0-9.]+", device_name.lower())
    return " ".join(word for word in words if word not in ("nvidia", "tesla", "amd", "graphics"))


def local_cluster() -> Cluster:
    """Return this machine as a cluster of one device per usable core, all sharing its memory.

    Its rates and links are None: the system does not report them, and this machine is not calibrated.
    """
    source = Source(
        title="the operating system of this machine",
        date=datetime.now(UTC).date().isoformat(),
        kind="measured",
    )
    num_cores = num_usable_cores()
    device = Device(
        name=UNMEASURED,
        title="one process of this machine's processor",
        vendor="any",
        memory_bytes=Figure(
            value=float(usable_memory_bytes()), source=source, note="the whole machine's, shared by all of its ranks"
        ),
    )
    return Cluster(
        name=LOCAL,
        title="this machine, one rank per core over gloo",
        device=device,
        num_devices=num_cores,
        devices_per_node=num_cores,
        source=source,
    )
