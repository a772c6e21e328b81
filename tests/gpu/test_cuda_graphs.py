"""CUDA graphs of microbatches train to the same bits as the same step without them: skipped where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config.write import to_toml
from meshwright.spec.job.job import Job
from training_runs import FinishedRun, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize(
    ("compute", "layout"),
    [
        ("float32", {"compile": "model"}),
        ("bfloat16", {"compile": "model", "compile_loss": True, "compile_optimizer": True}),
        ("bfloat16", {"compile": "model", "loss_chunks": 2}),
    ],
    ids=["float32", "bfloat16, all compiled", "bfloat16, loss in chunks"],
)
def test_graphs_train_to_the_same_bits(tmp_path: Path, compute: str, layout: dict[str, Any]) -> None:
    # 4 microbatches a step; documents and validation pass through the same inputs.
    sections = {"precision": {"compute": compute}, "data": {"mask_documents": True, "validation_fraction": 0.1}}
    without = train(tmp_path, "without", layout, sections)
    graphs = train(tmp_path, "graphs", {**layout, "cuda_graphs": True}, sections)
    assert graphs.losses == without.losses
    assert graphs.grad_norms == without.grad_norms
    assert graphs.parameter_hash == without.parameter_hash


@pytest.mark.parametrize("compile_", [False, True])
def test_eager_and_compiled_blocks_are_captured(tmp_path: Path, compile_: bool) -> None:
    layout = {"compile": compile_}
    without = train(tmp_path, "without", layout, {})
    graphs = train(tmp_path, "graphs", {**layout, "cuda_graphs": True}, {})
    assert graphs.losses == pytest.approx(without.losses, rel=1e-5)
    assert "captured" in (tmp_path / "graphs.log").read_text()


NOISY = """
from torch import nn

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3)) for _ in range(2))
        self.head = nn.Linear(32, 512)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
"""


def test_dropout_draws_the_same_numbers_and_a_model_of_ones_own_is_captured(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    sections = {"model": {"source": "noisy:Noisy", "options": {}}}
    without = train(tmp_path, "without", {}, sections)
    graphs = train(tmp_path, "graphs", {"cuda_graphs": True}, sections)
    assert graphs.losses == pytest.approx(without.losses, rel=1e-5)
    assert "captured" in (tmp_path / "graphs.log").read_text()


WAITING = NOISY.replace("x = x + block(x)", "x = x + block(x) * float(x.abs().max() > 0)")


def test_a_model_that_waits_for_the_device_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(WAITING)
    sections = {"model": {"source": "noisy:Noisy", "options": {}}}
    with pytest.raises(AssertionError, match="holds an operation that CUDA graphs cannot capture"):
        train(tmp_path, "graphs", {"cuda_graphs": True}, sections)


def test_a_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    layout = {"compile": "model", "cuda_graphs": True}
    whole = train(tmp_path, "whole", layout, {})
    # Before, and after the capture.
    for stop in (2, 4):
        name = f"stopped-{stop}"
        train(tmp_path, name, layout, {"train": {"stop_after": stop}}, code=75)
        resumed = train(tmp_path, name, layout, {}, "--resume")
        assert resumed.parameter_hash == whole.parameter_hash, stop


def test_a_step_that_the_host_bounds_is_faster(tmp_path: Path) -> None:
    """Print the median step with and without graphs: of small kernels, where launches are what a step takes."""
    options = {"dim": 256, "num_layers": 12, "num_heads": 8, "num_kv_heads": 8, "head_dim": 32, "ffn_dim": 512}
    sections = {
        "model": {"source": "llama-1m", "options": options},
        "train": {"steps": 30, "seq_len": 128, "global_batch_size": 8},
        "precision": {"compute": "bfloat16"},
    }
    found = {}
    for name, layout in (("without", {}), ("graphs", {"cuda_graphs": True})):
        started_s = time.perf_counter()
        run = train(tmp_path, name, {"compile": "model", **layout}, sections)
        times = sorted(row["step_ms"] for row in run.rows[10:])
        found[name] = times[len(times) // 2]
        memory = run.rows[-1]["memory_bytes"] / 2**20
        print(f"{name}: {found[name]:.2f} ms a step, {memory:.0f} MiB, run of {time.perf_counter() - started_s:.0f} s")
    assert found["graphs"] < found["without"]


def train(
    folder: Path, name: str, layout: dict[str, Any], sections: dict[str, Any], *arguments: str, code: int = 0
) -> FinishedRun:
    """Run `meshwright train` on one device and return what it left."""
    run = {"device": "cuda", "deterministic": True, "dir": str(folder / name)}
    job = tiny_job(folder, **{**sections, "layout": {**layout, "microbatch_size": 2}, "run": run})
    job_file = folder / f"{name}.toml"
    job_file.write_text(to_toml(Job.from_dict(job)))
    command = [sys.executable, "-m", "meshwright", "train", str(job_file), "--ranks", "1", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    assert done.returncode == code, done.stderr[-3000:]
    return FinishedRun(folder / name, [done.returncode])
