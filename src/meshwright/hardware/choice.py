"""`NAME:COUNT`: how a command line names a cluster and its size; NAME alone is how a job does, as cluster.name.

NAME is a cluster of the catalogue (`h100-ib400:256`) or a device (`h100:256`), which selects the most common cluster
of that device: the one whose file says `is_usual = true`, a user's own before ours.
"""

import tomllib
from functools import lru_cache

from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import (
    LOCAL,
    Entry,
    cluster_names,
    entries,
    load_cluster,
    load_device,
    local_cluster,
    user_folder,
)
from meshwright.spec.job.sections import ClusterSection
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.problem import nearest_name


def choose_cluster(text: str) -> Cluster:
    """Return the cluster that `text`, NAME:COUNT of devices, names, for a bare device its most common one.

    Raises ConfigError for an unknown name, a count that is none, and one that the cluster cannot have.
    """
    name, colon, count = text.partition(":")
    num_devices = _count(text, name, count if colon else "")
    return named_cluster(name).with_num_devices(num_devices, f"--cluster {text}: COUNT = {num_devices}")


def named_cluster(name: str) -> Cluster:
    """Return the cluster called `name`, or the commonest one of the device of that name; raises ConfigError."""
    name = name.lower()
    return load_cluster(name if name in cluster_names() else _usual_cluster(name))


def cluster_of_section(section: ClusterSection) -> Cluster:
    """Return the cluster that a job names; raises ConfigError for an unknown name.

    This machine with GPUs, `name = "local"` and a device, is a node of that device's commonest cluster; where the
    device has none, its links are unknown.
    """
    if section.name != LOCAL or section.device is None:
        return named_cluster(section.name)
    device = load_device(section.device)
    usual = next(iter(_usual_clusters(device.name)), None)
    if usual is None:
        return local_cluster().replace(device=device)
    cluster = load_cluster(usual)
    return cluster.with_num_devices(cluster.devices_per_node).replace(name=LOCAL)


def _count(text: str, name: str, count: str) -> int:
    if "," in count and ":" in count:
        raise ConfigError(f"--cluster {text}: several clusters; must be one NAME:COUNT: give --cluster once for each")
    digits = count.replace("_", "").replace(",", "")
    if not digits.isdecimal() or int(digits) < 1:
        what = f"COUNT = {count}" if count else "the number of devices is missing"
        raise ConfigError(
            f"--cluster {text}: {what}; must be NAME:COUNT with a whole number from 1: write {name or 'h100'}:8"
        )
    return int(digits)


def _usual_cluster(name: str) -> str:
    """Return the name of the commonest cluster of the device called `name`; raises ConfigError where there is none."""
    devices = _devices_by_name()
    if name not in devices:
        nearest = nearest_name(name, [*cluster_names(), *devices])
        raise ConfigError(
            f"{name!r} is no cluster and no device of the catalogue: "
            + (f"did you mean {nearest!r}? " if nearest else "")
            + "`meshwright list clusters` and `meshwright list devices` show them all; your own go to "
            + f"{user_folder() / 'clusters'}/NAME.toml"
        )
    usual = _usual_clusters(devices[name])
    if not usual:
        others = ", ".join(cluster for cluster, _ in _clusters_of(devices[name]))
        raise ConfigError(
            f"{name!r} is a device that no cluster is usual for: "
            + (f"name one of {others}" if others else "describe one in a file of your own with is_usual = true")
        )
    return usual[0]


def _usual_clusters(device: str) -> list[str]:
    """Return the clusters that are usual for the device, the user's own first."""
    usual = [
        (not entry.is_ours, cluster)
        for cluster, entry in _clusters_of(device)
        if _values(entry).get("is_usual") is True
    ]
    return [cluster for _, cluster in sorted(usual, reverse=True)]


def _clusters_of(device: str) -> list[tuple[str, Entry]]:
    return [(name, entry) for name, entry in entries("clusters").items() if _values(entry).get("device") == device]


def _devices_by_name() -> dict[str, str]:
    """Return the catalogue name of every device by that name and by its short ones."""
    found = entries("devices")
    short = {nick: name for name, entry in found.items() for nick in _short_names(_values(entry))}
    return {**short, **{name: name for name in found}}


def _values(entry: Entry) -> dict[str, object]:
    """Return what an entry's file says, unchecked: an entry that is chosen is loaded, and checked, afterwards."""
    try:
        return _parsed(entry.file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


# The whole catalogue is looked through for each name: half a second.
_parsed = lru_cache(maxsize=512)(tomllib.loads)


def _short_names(values: dict[str, object]) -> list[str]:
    names = values.get("short_names", [])
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
