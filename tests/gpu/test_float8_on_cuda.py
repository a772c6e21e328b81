"""Float8 layers on a CUDA device that has the units: skipped, with the reason, elsewhere."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

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

MODEL: dict[str, Any] = {
    "source": "llama-1m",
    "options": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 128},
}


MIXTURE = {
    "source": "moe-4m",
    "options": {**MODEL["options"], "expert_ffn_dim": 64, "num_experts": 4, "experts_per_token": 2},
}
_CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def trained(
    folder: Path, name: str, recipe: str, *, compiles: bool, model: dict[str, Any] = MODEL, **precision: Any
) -> FinishedRun:
    sections = {
        "model": model,
        "precision": {"compute": "bfloat16", "float8": recipe, **precision},
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


@pytest.mark.skipif(_CAPABILITY[0] != 9, reason="grouped float8 matmuls need compute capability 9.0 (Hopper)")
@pytest.mark.parametrize("compiles", [False, True])
def test_experts_in_float8_train_close_to_bfloat16(tmp_path: Path, compiles: bool) -> None:
    wide = trained(tmp_path, "wide", "rowwise", compiles=compiles, model=MIXTURE)
    low = trained(tmp_path, "low", "rowwise", compiles=compiles, model=MIXTURE, float8_experts=True)
    assert low.losses[1] != wide.losses[1]
    assert low.losses[6] == pytest.approx(wide.losses[6], rel=0.02)
    assert "the experts" not in low.run.rank_log(0).read_text()


@pytest.mark.skipif(_CAPABILITY[0] != 9, reason="needs Hopper, whose kernels are compared")
def test_a_grouped_matmul_is_what_its_emulation_says() -> None:
    experts = import_module("meshwright.parallelism.float8.float8_experts")
    generator = torch.Generator("cuda").manual_seed(0)
    counts = torch.tensor([32, 0, 80, 16], device="cuda")
    found = []
    for emulates in (False, True):
        rows, weights = (
            torch.randn(*sizes, generator=generator.manual_seed(seed), device="cuda").bfloat16().requires_grad_()
            for seed, sizes in enumerate(((128, 256), (4, 192, 256)))
        )
        output = experts.Float8GroupedMatmul(emulates=emulates)(rows, weights, counts)
        output.backward(torch.ones_like(output))
        found.append((output.detach(), rows.grad, weights.grad))
    for kernel, emulated in zip(*found, strict=True):
        # Both are rounded to bfloat16; the kernel accumulates with fewer bits.
        torch.testing.assert_close(kernel, emulated, rtol=0.02, atol=0.02 * float(emulated.abs().max()))


def test_mxfp8_trains_or_the_next_recipe_does_and_the_log_says_so(tmp_path: Path) -> None:
    expected = trained(tmp_path, "wide", "none", compiles=True)
    found = trained(tmp_path, "mxfp8", "mxfp8", compiles=True)
    assert found.losses[6] == pytest.approx(expected.losses[6], rel=0.02)
    runs = found.manifest.job.precision.float8
    assert runs == "mxfp8" if _CAPABILITY[0] == 10 else runs in ("mxfp8", "rowwise", "tensorwise")


def test_layers_that_are_slower_stay_in_bfloat16(tmp_path: Path) -> None:
    found = trained(tmp_path, "small", "tensorwise", compiles=True, float8_filter="slower", float8_skip=[])
    # Layers of 64 features gain nothing.
    assert found.manifest.job.precision.float8 == "none"
