"""list: the models, devices and clusters that a job can name."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rich.console import RenderableType

from meshwright.app.results.result import Result
from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import cluster_names, entries, load_cluster, load_device
from meshwright.log import logger
from meshwright.pages.tables.page_table import PageTable
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import Device, Figure
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS
from meshwright.units import format_count

Records = list[dict[str, Any]]
_Listed = tuple[Records, PageTable, str]
"""What --json prints, the table, and a note below it."""
_Loaded = TypeVar("_Loaded", Device, Cluster)
_UNKNOWN = "-"
_REFERENCE_SEQ_LEN = 4096


@dataclass(frozen=True, repr=False)
class Listing(Result):
    """What can be named. Data frame: a row for each."""

    kind: str
    records: Records
    drawn: PageTable
    note: str

    def _summary(self) -> str:
        return f"Listing {self.kind}: {', '.join(record['name'] for record in self.records)}"

    def _page(self) -> Iterator[RenderableType]:
        yield self.drawn
        yield ""
        yield f"[dim]{self.note}[/]"

    def _rows(self) -> Records:
        return self.records


def list_(kind: Literal["models", "devices", "clusters"]) -> Listing:
    """Return the models, devices or clusters that a job can name, the user's own among them."""
    return Listing(kind, *{"models": _models, "devices": _devices, "clusters": _clusters}[kind]())


def _models() -> _Listed:

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
    return records, _table(header, rows), note


def _devices() -> _Listed:

    found = entries("devices")
    devices = _loaded(load_device, found)
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
    return records, _table(header, rows), note


def _loaded(load: Callable[[str], _Loaded], names: Iterable[str]) -> list[_Loaded]:
    """Return what loads; a line in the log names each file that does not, and its problem."""
    loaded = []
    for name in names:
        try:
            loaded.append(load(name))
        except ConfigError as error:
            logger.warning("not listed: %s", error)
    return loaded


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


def _clusters() -> _Listed:

    found = entries("clusters")
    clusters = _loaded(load_cluster, cluster_names())
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
    header = [
        "cluster",
        "device",
        "devices",
        "per\nnode",
        "NVLink\ndomain",
        "intra-node\nGB/s",
        "inter-node\nGB/s",
        "from",
    ]
    note = (
        "GB/s in one direction for each device; - is unknown or none. cluster.num_devices changes the size.\n"
        "--json shows every figure with its source."
    )
    return records, _table(header, rows), note


def _origin(is_ours: bool) -> str:
    return "" if is_ours else "yours"


def _scaled(figure: Figure | None, unit: float) -> str:
    if figure is None:
        return _UNKNOWN
    scaled = figure.value / unit
    return f"{scaled:.0f}" if scaled >= 1000 else f"{scaled:.4g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> PageTable:
    # The last column of the catalogues says where an entry comes from; it is shown only when some are the user's.
    keep = [index for index, _ in enumerate(header) if any(row[index] for row in rows)]
    table = PageTable(*(header[index] if rows[0][index][:1].isalpha() else f"{header[index]}#" for index in keep))
    for column in table.columns:
        # A name cut short cannot be copied into a job.
        column.no_wrap, column.vertical = True, "bottom"
    for row in rows:
        table.add_row(*(row[index] for index in keep))
    return table
