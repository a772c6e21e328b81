"""Float8 layers on a CUDA device that has the units: skipped, with the reason, elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.config.write import to_toml
from meshwright.spec.job.job import Job
from training_runs import FinishedRun, tiny_job

_HAS_FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _HAS_FLOAT8, reason="needs a CUDA device of compute capability 8.9; this machine has none"),
]
pytest.importorskip("torchao", reason="needs meshwright[torchao]")

MODEL = {
    "source": "llama-1m",
    "options": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 128},
}


def trained(folder: Path, name: str, recipe: str, *, compiles: bool) -> FinishedRun:
    sections = {
        "model": MODEL,
        "precision": {"compute": "bfloat16", "float8": recipe},
        "layout": {"dp_shard": 1, "compile": compiles},
        "run": {"device": "cuda", "dir": str(folder / name)},
    }
    job_file = folder / f"{name}.toml"
    job_file.write_text(to_toml(Job.from_dict(tiny_job(folder, **sections))))
    subprocess.run([sys.executable, "-m", "meshwright", "train", str(job_file), "--ranks", "1"], check=True)
    return FinishedRun(folder / name, [0])


@pytest.mark.parametrize("compiles", [False, True])
def test_every_recipe_trains_close_to_bfloat16(tmp_path: Path, compiles: bool) -> None:
    expected = trained(tmp_path, "none", "none", compiles=compiles)
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        found = trained(tmp_path, recipe, recipe, compiles=compiles)
        assert found.losses[1] != expected.losses[1]
        assert found.losses[6] == pytest.approx(expected.losses[6], rel=0.02)
