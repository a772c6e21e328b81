"""Offloaded activations and a failed allocation on a CUDA device; skipped, with the reason, where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.config.write import to_toml
from meshwright.spec.job.job import Job
from training_runs import FinishedRun, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]

SIZES = {"dim": 512, "num_layers": 12, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "ffn_dim": 1536}


def _train(folder: Path, name: str, *overrides: str, **sections: dict[str, object]) -> tuple[FinishedRun | None, str]:
    """Return the run, None if it failed, and what it printed."""
    given = {
        "model": {"source": "llama-1m", "options": {"max_seq_len": 4096, **SIZES}},
        "train": {"steps": 4, "seq_len": 2048, "global_batch_size": 4},
        "precision": {"compute": "bfloat16"},
        "run": {"device": "cuda", "deterministic": True, "dir": str(folder / name)},
    }
    file = folder / f"{name}.toml"
    file.write_text(to_toml(Job.from_dict(tiny_job(folder, **(given | sections)))))
    command = [sys.executable, "-m", "meshwright", "train", str(file), "--ranks", "1", *overrides]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    run = FinishedRun(folder / name, [0]) if ended.returncode == 0 else None
    return run, ended.stdout + ended.stderr


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_offload_takes_less_memory_and_changes_no_bit(tmp_path: Path, checkpoint: str) -> None:
    recompute = f"layout.activation_checkpoint={checkpoint}"
    plain, _ = _train(tmp_path, "plain", recompute)
    moved, said = _train(tmp_path, "moved", recompute, "layout.activation_offload=true")
    assert plain is not None
    assert moved is not None, said
    assert moved.losses == plain.losses
    assert moved.parameter_hash == plain.parameter_hash
    peaks = [max(row["memory_bytes"] for row in run.rows) for run in (plain, moved)]
    assert peaks[1] < peaks[0]


def test_a_failed_allocation_leaves_a_table_and_a_snapshot(tmp_path: Path) -> None:
    batch = {"steps": 1, "seq_len": 4096, "global_batch_size": 4096}
    run, said = _train(tmp_path, "large", train=batch, layout={"dp_shard": 1, "microbatch_size": 4096})
    assert run is None
    assert "is out of memory: " in said
    assert "optimizer states" in said
    assert "set layout." in said
    assert (tmp_path / "large" / "memory" / "rank-0.pickle").stat().st_size > 0
