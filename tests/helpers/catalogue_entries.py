"""Entries of the hardware catalogue: the names that ship, and files of a user's own."""

from importlib.resources import files

SHIPPED = {
    kind: sorted(file.name.removesuffix(".toml") for file in (files("meshwright.hardware") / kind).iterdir())
    for kind in ("devices", "clusters")
}
INTRA_NODE = """\
[intra_node]
name = "NVLink"
bytes_per_s = { value = "450 GB/s", source = "wiki" }

"""
INTER_NODE = """\
[inter_node]
name = "Ethernet"
bytes_per_s = { value = "100 Gb/s", source = "wiki" }

"""
OLD_COLLECTIVE = """\
[[inter_node.collectives]]
kind = "unshard"
num_ranks = 2
latency_s = { value = "1 ms", source = "wiki" }
bytes_per_s = { value = "1 GB/s", source = "wiki" }

"""
MY_CLUSTER = f"""
title = "My rack"
device = "x1"
num_devices = 16
devices_per_node = 8
num_nics_per_node = 2
source = "wiki"

{INTRA_NODE}{INTER_NODE}[sources.wiki]
title = "our wiki"
date = "2026"
kind = "reported"
"""
