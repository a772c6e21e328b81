"""Peak memory of `meshwright export` and `import`, next to the bytes of the model: run as a module.

A checkpoint with random weights is written piece by piece, exported and imported again, each in a process of its own
whose resident memory is compared with that of the same process before it starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.resident import Peak
from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.maps.shapes import stored_shapes
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saving import Extent, SaveRequest, with_bytes, write_checkpoint
from meshwright.checkpoint.shards import Shard
from meshwright.checkpoint.torch_formats.dcp_export import export_dcp
from meshwright.spec.job.job import Job
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.run.run import Manifest, Run
from meshwright.units import format_bytes

SIZES = {"vocab_size": 32_000, "dim": 2048, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
DENSE = LlamaArchitecture.from_dict({**SIZES, "num_layers": 12, "ffn_dim": 8192})
EXPERTS = MoEArchitecture.from_dict(
    {**SIZES, "num_layers": 4, "ffn_dim": 2048, "num_experts": 64, "experts_per_token": 4, "expert_ffn_dim": 768}
)
MODELS = {"dense": DENSE, "experts": EXPERTS}


def write_run(folder: Path, model: LlamaArchitecture) -> int:
    """Write a run with one checkpoint of random weights in float32 and return their bytes."""
    shapes = stored_shapes(model)
    run = Run(folder)
    request = SaveRequest(
        run.checkpoint(1),
        {"step": 1},
        ["model"],
        {f"model/{name}": ("float32", shape) for name, shape in shapes.items()},
    )
    write_checkpoint(request, _random(shapes), GroupPeers())
    config = folder / "config.json"
    config.write_text(json.dumps(architecture_to_hf(model)))
    job = Job.from_dict({"model": {"source": str(config)}, "data": {"source": "none:None"}})
    run.manifest.write_text(Manifest(job=job, seed=0, num_parameters=1).to_json())
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * torch.float32.itemsize


def _random(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[Extent, memoryview]]:
    for name, shape in shapes.items():
        data = torch.randn(shape)
        yield from with_bytes([Shard(f"model/{name}", "float32", shape, Box((0,) * len(shape), shape), data)])


def measure(what: str, source: str, target: str) -> None:
    """Do one conversion in this process and print its memory and time as JSON."""
    stored_shapes(DENSE.replace(num_layers=1))
    peak = Peak()
    start_s = time.perf_counter()
    if what == "export to dcp":
        export_dcp(Path(source), Path(target))
    elif what.startswith("import"):
        import_folder(Path(source), Path(target))
    else:
        export(Path(source), Path(target), weights=ExportFormat("float32"))
    wall_s = time.perf_counter() - start_s
    print(json.dumps({"peak_bytes": peak.above_start(), "wall_s": wall_s}))


def main() -> None:
    """Measure all conversions of the models named and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--dcp", action="store_true", help="also export as a DCP folder, and import that")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    print("| model | bytes | conversion | peak above the start | time |\n|---|---|---|---|---|")
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            run, out, again, dcp, last = (Path(folder) / part for part in ("run", "out", "again", "dcp", "last"))
            num_bytes = write_run(run, MODELS[name])
            conversions = [("export", run, out), ("import", out, again)]
            conversions += [("export to dcp", again, dcp), ("import of dcp", dcp, last)] if options.dcp else []
            for what, source, target in conversions:
                command = [sys.executable, "-m", "benchmarks.hf_memory", "--measure", what, str(source), str(target)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found = json.loads(done.stdout.splitlines()[-1])
                peak = format_bytes(found["peak_bytes"])
                print(f"| {name} | {format_bytes(num_bytes)} | {what} | {peak} | {found['wall_s']:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
