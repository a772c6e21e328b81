"""`NAME:COUNT`: how a command line names a cluster and its size; NAME alone is how a job does, as cluster.name.

NAME is a cluster of the catalogue (`h100-ib400:256`) or a device (`h100:256`), which selects the most common cluster
of that device: the one whose file says `is_usual = true`, a user's own before ours where it has so many devices.
"""

from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import (
    LOCAL,
    Entry,
    cluster_names,
    entries,
    load_cluster,
    load_device,
    local_cluster,
    names_in,
    user_folder,
)
from meshwright.log import logger
from meshwright.spec.job.sections import ClusterSection
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.problem import nearest_name


def choose_cluster(text: str) -> Cluster:
    """Return the cluster that `text`, NAME:COUNT of devices, names, for a bare device its most common one.

    Raises ConfigError for an unknown name, a count that is none, and one that the cluster cannot have.
    """
    name, colon, count = text.partition(":")
    num_devices = _count(text, name, count if colon else "")
    return named_cluster(name, num_devices).with_num_devices(num_devices, f"--cluster {text}: COUNT = {num_devices}")


def named_cluster(name: str, num_devices: int | None = None) -> Cluster:
    """Return the cluster called `name`, or the commonest one of the device of that name; raises ConfigError.

    The commonest is the first that can have `num_devices`, which it is not given here.
    """
    name = name.lower()
    return load_cluster(name) if name in cluster_names() else _usual_cluster(name, num_devices)


def cluster_of_section(section: ClusterSection) -> Cluster:
    """Return the cluster that a job names; raises ConfigError for an unknown name.

    This machine with GPUs, `name = "local"` and a device, is a node of that device's commonest cluster; where the
    device has none, its links are unknown.
    """
    if section.name != LOCAL or section.device is None:
        return named_cluster(section.name, section.num_devices)
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


def _usual_cluster(name: str, num_devices: int | None) -> Cluster:
    """Return the commonest cluster of the device called `name`, of those that can have `num_devices`; raises
    ConfigError where there is none.
    """
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
    return _first_that_takes(usual, num_devices)


def _first_that_takes(names: list[str], num_devices: int | None) -> Cluster:
    """Return the first cluster that can have `num_devices`, or the last; reports the bad files before it."""
    for name in names[:-1]:
        try:
            cluster = load_cluster(name)
        except ConfigError as error:
            logger.warning("%s\n%s is taken instead", error, " or ".join(names[names.index(name) + 1 :]))
            continue
        if num_devices is None or cluster.takes(num_devices):
            return cluster
    return load_cluster(names[-1])


def _usual_clusters(device: str) -> list[str]:
    """Return the clusters that are usual for the device, the user's own first."""
    usual = [
        (not entry.is_ours, cluster)
        for cluster, entry in _clusters_of(device)
        if entry.unchecked.get("is_usual") is True
    ]
    return [cluster for _, cluster in sorted(usual, reverse=True)]


def _clusters_of(device: str) -> list[tuple[str, Entry]]:
    return [(name, entry) for name, entry in entries("clusters").items() if entry.unchecked.get("device") == device]


def _devices_by_name() -> dict[str, str]:
    """Return the catalogue name of every device by that name and by its short ones."""
    found = entries("devices")
    short = {nick: name for name, entry in found.items() for nick in names_in(entry, "short_names")}
    return {**short, **{name: name for name in found}}
