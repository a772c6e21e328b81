"""`meshwright list`: the models, devices and clusters that a job can name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.result_command import print_json, result_command
from meshwright.pages.console import page_console

if TYPE_CHECKING:
    from meshwright.spec.machine.device import Device
    from meshwright.spec.machine.figure import Figure

_Listing = tuple[list[dict[str, Any]], Callable[[], None]]
"""What --json prints, and what prints the table."""

_NO_LIMIT = 10_000
_UNKNOWN = "-"
_REFERENCE_SEQ_LEN = 4096


@result_command
@click.argument("kind", type=click.Choice(["models", "devices", "clusters"]))
def command(kind: str, as_json: bool) -> None:
    """List the models, devices or clusters that a job can name.

    Devices and clusters of your own go to ~/.config/meshwright/devices/NAME.toml and clusters/NAME.toml, or into the
    folder that MESHWRIGHT_CATALOGUE names.
    """
    records, show = {"models": _models, "devices": _devices, "clusters": _clusters}[kind]()
    if as_json:
        print_json(records)
    else:
        show()


def _models() -> _Listing:
    from meshwright.spec.model.model_spec import model_spec
    from meshwright.spec.model.presets import PRESETS
    from meshwright.units import format_count

    specs = {name: model_spec(architecture) for name, architecture in PRESETS.items()}
    records = [
        {
            "name": name,
            "num_parameters": specs[name].num_parameters,
            "training_flops_per_token": specs[name].flops_per_token(_REFERENCE_SEQ_LEN),
            "seq_len": _REFERENCE_SEQ_LEN,
            "architecture": architecture.to_dict(),
        }
        for name, architecture in PRESETS.items()
    ]
    rows = [
        [
            name,
            format_count(specs[name].num_parameters),
            str(architecture.num_layers),
            str(architecture.dim),
            f"{architecture.num_heads}/{architecture.num_kv_heads}",
            str(architecture.ffn_dim),
            str(architecture.vocab_size),
            format_count(specs[name].flops_per_token(_REFERENCE_SEQ_LEN)),
        ]
        for name, architecture in PRESETS.items()
    ]
    header = ["model", "parameters", "layers", "dim", "heads/kv", "ffn", "vocab", "FLOPs/token"]
    note = (
        f"FLOPs/token: forward and backward at {_REFERENCE_SEQ_LEN} tokens a sequence, nothing computed twice.\n"
        'Name one in a job as model.source = "NAME"; model.options changes its fields.'
    )
    return records, lambda: _print_table(header, rows, note)


def _devices() -> _Listing:
    from meshwright.hardware.catalogue import entries, load_device

    found = entries("devices")
    devices = [load_device(name) for name in found]
    records = [{**device.to_dict(), "file": str(found[device.name].file)} for device in devices]
    rows = [[*_device_row(device), _origin(found[device.name].is_ours)] for device in devices]
    header = [
        "device",
        "bfloat16\nTFLOP/s",
        "float8\nTFLOP/s",
        "float4\nTFLOP/s",
        "memory\nGB",
        "memory\nGB/s",
        "SMs",
        "power\nW",
        "from",
    ]
    note = (
        "Dense rates; - is not published. GB = 1e9 bytes. --json shows every figure with its source.\n"
        "MFU needs the local device's peak: it is recognised by the name that torch prints, or set\n"
        'cluster.device = "NAME".'
    )
    return records, lambda: _print_table(header, rows, note)


def _device_row(device: Device) -> list[str]:
    rates = device.dense_flops_per_s
    return [
        device.name,
        *(_scaled(rates.of(dtype), 1e12) for dtype in ("bfloat16", "float8", "float4")),
        _scaled(device.memory_bytes, 1e9),
        _scaled(device.memory_bytes_per_s, 1e9),
        _scaled(device.num_sms, 1),
        _scaled(device.power_w, 1),
    ]


def _clusters() -> _Listing:
    from meshwright.hardware.catalogue import cluster_names, entries, load_cluster

    found = entries("clusters")
    clusters = [load_cluster(name) for name in cluster_names()]
    records = [
        {**cluster.to_dict(), "file": str(found[cluster.name].file) if cluster.name in found else None}
        for cluster in clusters
    ]
    rows = []
    for cluster in clusters:
        share = cluster.inter_node_bytes_per_s_per_device
        rows.append(
            [
                cluster.name,
                cluster.device.name,
                str(cluster.num_devices),
                str(cluster.devices_per_node),
                str(cluster.domain_size),
                _scaled(cluster.intra_node.bytes_per_s if cluster.intra_node else None, 1e9),
                _UNKNOWN if share is None else f"{share / 1e9:.4g}",
                _origin(cluster.name not in found or found[cluster.name].is_ours),
            ]
        )
    header = ["cluster", "device", "devices", "per\nnode", "NVLink\ndomain", "inside\nGB/s", "network\nGB/s", "from"]
    note = (
        "GB/s in one direction for each device; - is unknown or none. cluster.num_devices changes the size.\n"
        "--json shows every figure with its source."
    )
    return records, lambda: _print_table(header, rows, note)


def _origin(is_ours: bool) -> str:
    return "" if is_ours else "yours"


def _scaled(figure: Figure | None, unit: float) -> str:
    if figure is None:
        return _UNKNOWN
    scaled = figure.value / unit
    return f"{scaled:.0f}" if scaled >= 1000 else f"{scaled:.4g}"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> None:
    from rich.table import Table

    # The last column of the catalogues says where an entry comes from; it is shown only when some are the user's.
    keep = [index for index, _ in enumerate(header) if any(row[index] for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index in keep:
        is_name = rows[0][index][:1].isalpha()
        table.add_column(header[index], justify="left" if is_name else "right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*(row[index] for index in keep))
    console = page_console()
    # A name cut short cannot be copied into a job: on a narrow terminal the table is wider than that.
    needed = console.measure(table, options=console.options.update(max_width=_NO_LIMIT)).maximum
    console.width = max(console.width, needed)
    console.print(table)
    console.print()
    console.print(note, style="dim", soft_wrap=True)
