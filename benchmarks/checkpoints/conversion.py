"""python -m benchmarks.checkpoints.conversion: how fast are export and import, next to a copy, transformers and torch?

A run of 1 GB of random float32 weights (Llama's layers) is exported, and the export imported again. In each round, in
random order, each way does its part once, in a process of its own: imports of Python, and the model that a way wants
in memory, are there before the time starts. What is read is read from the disk, what is written ends with fsync. The
limit is a plain copy: read 1 MiB, write it, fsync at the end. Ways that only write or only read do half of its work.
CPU seconds, which other programs move less than wall time, are of the processes that convert.

Bars: ours within 1.2 times the plain copy, and no slower than transformers or torch that do the same work.

Expected, written before the first run, as times of the plain copy and peak above the start: export 1.25 and 140 MiB,
two processes 1.0 once they run and 4 s more to start them; save_pretrained 0.6, with loading 1.6 and 1 GB; safetensors
0.6; torch's writer 0.9 and 1 GB. Import 1.25 and 120 MiB; from_pretrained 0.6 and 1 GB; torch's reader and dcp.save 1.7
and 2 GB, as it maps the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp

from benchmarks.checkpoints.states import drop_cached
from benchmarks.hf_memory import DENSE, write_run
from benchmarks.resident import Peak
from meshwright.checkpoint.hf.export import ExportRequest, export, export_together
from meshwright.checkpoint.hf.folder import HfFolder
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.maps.families import name_map
from meshwright.checkpoint.hf.maps.shapes import stored_shapes
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.section import SectionReader
from meshwright.extras import import_extra
from meshwright.trainer.launch.local.local_ranks import run_ranks
from meshwright.units import format_bytes

MODEL = DENSE.replace(num_layers=2)
COPIED_BYTES = 1 << 20
"""At once, by a plain copy: they stay in the cache of a core."""
Act = Callable[[], Any]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, folder = arguments.measure
        print(json.dumps(measure(way, Path(folder))))
        return 0
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        num_bytes = write_run(folder / "run", MODEL)
        export(folder / "run", folder / "hf")
        for number in range(arguments.rounds):
            for way in random.Random(number).sample(list(WAYS), len(WAYS)):
                command = [sys.executable, "-m", "benchmarks.checkpoints.conversion", "--measure", way, name]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                _require_written(folder / "out", 0 if "only reads" in way else num_bytes)
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
                shutil.rmtree(folder / "out", ignore_errors=True)
    Console().print(_table(found, num_bytes))
    return 0


def _require_written(out: Path, num_bytes: int) -> None:
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if written < num_bytes:
        raise RuntimeError(f"{out} has {written:,} bytes, the model {num_bytes:,}")


def _table(found: dict[str, list[dict[str, float]]], num_bytes: int) -> Table:
    table = Table(
        "what", "s", "MB/s", "times the copy", "CPU s", "peak above the start", title=f"{num_bytes / 1e9:.2f} GB"
    )
    for way in WAYS:
        copies = [row["wall_s"] for row in found[f"{way.partition(',')[0]}, plain copy"]]
        for key, note in {"wall_s": "", "started_s": ", once started"}.items():
            if values := [row[key] for row in found[way] if key in row]:
                ratio = statistics.median(a / b for a, b in zip(values, copies, strict=True))
                wall_s = statistics.median(values)
                cpu_s = statistics.median(row["cpu_s"] for row in found[way])
                peak = format_bytes(int(statistics.median(row["peak_bytes"] for row in found[way])))
                table.add_row(
                    way + note, f"{wall_s:.2f}", f"{num_bytes / wall_s / 1e6:.0f}", f"{ratio:.2f}", f"{cpu_s:.2f}", peak
                )
    return table


def measure(way: str, folder: Path) -> dict[str, float]:
    """Return the seconds of one way in this process, and its peak; of two processes the sum of theirs."""
    stored_shapes(MODEL.replace(num_layers=1))
    act = WAYS[way](folder)
    drop_cached(folder)
    found, of_ranks = _measured(act)
    if of_ranks:
        found["started_s"] = max(each["wall_s"] for each in of_ranks)
        found |= {key: sum(each[key] for each in of_ranks) for key in ("cpu_s", "peak_bytes")}
    return found


def _measured(act: Act) -> tuple[dict[str, float], Any]:
    peak, start_s, start_cpu_s = Peak(), time.perf_counter(), time.process_time()
    result = act()
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": float(peak.above_start())}, result


def _by_two(convert: Callable[..., object]) -> Callable[[Path], Act]:
    return lambda folder: lambda: run_ranks(_on_rank, 2, convert, folder, timeout_s=600)


def _on_rank(convert: Callable[..., object], folder: Path) -> dict[str, float]:
    distributed.barrier()
    return _measured(lambda: convert(folder, GroupPeers()))[0]


def _export(folder: Path, peers: GroupPeers | None = None) -> None:
    export_together(ExportRequest(folder / "run", folder / "out"), peers or GroupPeers(is_alone=True))


def _import(folder: Path, peers: GroupPeers | None = None) -> None:
    import_folder(folder / "hf", folder / "out", peers=peers)


def _copy(source: Path, out: Path) -> None:
    out.mkdir()
    buffer = torch.empty(COPIED_BYTES, dtype=torch.uint8).numpy().data
    for path in (path for path in source.rglob("*") if path.suffix in (".bin", ".safetensors")):
        with path.open("rb", buffering=0) as read, (out / path.name).open("wb", buffering=0) as written:
            while count := read.readinto(buffer):
                written.write(buffer[:count])
            os.fsync(written.fileno())


def _save_pretrained(folder: Path) -> Act:
    model = _their_model(folder, _tensors(folder))
    return lambda: _synced(folder, lambda: model.save_pretrained(folder / "out"))


def load_and_save_pretrained(folder: Path) -> Act:
    """Return what loads folder/run whole, and saves it as transformers' model of folder/hf."""
    _their_model(folder, {})  # what it imports is imported
    load = partial(_loaded_checkpoint, folder)
    return lambda: _synced(folder, lambda: _their_model(folder, load()).save_pretrained(folder / "out"))


def _transformers() -> Any:
    # Not at the top: processes of ours would import it, too.
    return import_extra("transformers", "a comparison with transformers")


def _their_model(folder: Path, tensors: dict[str, Tensor]) -> Any:
    transformers = _transformers()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder / "hf"))
    model.load_state_dict(tensors, strict=bool(tensors), assign=True)
    return model


def _save_safetensors(folder: Path) -> Act:
    tensors = _tensors(folder)
    (folder / "out").mkdir()
    return lambda: _synced(folder, lambda: save_file(tensors, folder / "out" / "model.safetensors"))


def _save_torch(folder: Path) -> Act:
    tensors, writer = _tensors(folder), dcp.HuggingFaceStorageWriter(str(folder / "out"))
    return lambda: dcp.save(tensors, storage_writer=writer, no_dist=True) and None


def _from_pretrained(folder: Path) -> Act:
    load = _transformers().AutoModelForCausalLM.from_pretrained

    def act() -> None:
        model = load(folder / "hf", dtype=torch.float32)
        # One element of each page: where a tensor is only mapped, this reads it.
        for parameter in model.parameters():
            parameter.view(-1)[::1024].sum()

    return act


def _import_torch(folder: Path) -> Act:
    source = HfFolder(folder / "hf")

    def act() -> None:
        tensors = {name: torch.empty(source.shape(name), dtype=source.dtype(name)) for name in source.names}
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(source.path)), no_dist=True)
        dcp.save(tensors, checkpoint_id=folder / "out", no_dist=True)

    return act


def _tensors(folder: Path) -> dict[str, Tensor]:
    source = HfFolder(folder / "hf")
    return {name: source.read(name) for name in sorted(source.names)}


def _loaded_checkpoint(folder: Path) -> dict[str, Tensor]:
    saved, names = SectionReader(next((folder / "run").glob("checkpoints/step-*")), "model"), name_map(MODEL)
    return {names.theirs(name)[0]: saved.read(name) for name in saved.shapes}


def _synced(folder: Path, act: Act) -> None:
    act()
    for path in (folder / "out").iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


WAYS: dict[str, Callable[[Path], Act]] = {
    "export, plain copy": lambda folder: lambda: _copy(folder / "run", folder / "out"),
    "export, ours": lambda folder: lambda: _export(folder),
    "export, ours by 2 processes": _by_two(_export),
    "export, load all and save_pretrained": load_and_save_pretrained,
    "export, save_pretrained (only writes)": _save_pretrained,
    "export, safetensors (only writes)": _save_safetensors,
    "export, torch's HF writer (only writes)": _save_torch,
    "import, plain copy": lambda folder: lambda: _copy(folder / "hf", folder / "out"),
    "import, ours": lambda folder: lambda: _import(folder),
    "import, ours by 2 processes": _by_two(_import),
    "import, torch's HF reader and dcp.save": _import_torch,
    "import, from_pretrained (only reads)": _from_pretrained,
}


if __name__ == "__main__":
    sys.exit(main())
