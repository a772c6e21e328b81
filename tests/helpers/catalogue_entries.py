"""Entries of the hardware catalogue: the names that ship, and files of a user's own."""

from importlib.resources import files

SHIPPED = {
    kind: sorted(file.name.removesuffix(".toml") for file in (files("meshwright.hardware") / kind).iterdir())
    for kind in ("devices", "clusters")
}
MY_CLUSTER = """
title = "My rack"
device = "x1"
num_devices = 16
devices_per_node = 8
num_nics_per_node = 2
source = "wiki"

[inter_node]
name = "Ethernet"
bytes_per_s = { value = "100 Gb/s", source = "wiki" }

[sources.wiki]
title = "our wiki"
date = "2026"
kind = "reported"
"""
