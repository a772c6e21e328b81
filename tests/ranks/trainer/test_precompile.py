"""`meshwright precompile`: what it writes is found by ranks that have compiled nothing, elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.utils import counters

from compiler_warnings import COMPILER_WARNINGS
from meshwright.app.precompile import precompile
from meshwright.config.write import to_toml
from meshwright.errors import ConfigError
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.compile_cache import load_cache
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import tiny_job

pytestmark = COMPILER_WARNINGS


def job_file(folder: Path, **layout: Any) -> Path:
    job = tiny_job(folder, layout={"compile": True, **layout}, run={"device": "cpu", "dir": str(folder / "run")})
    file = folder / "job.toml"
    file.write_text(to_toml(Job.from_dict(job)))
    return file


@pytest.mark.parametrize("layout", [{"compile": False}, {"compile_backend": "aot_eager"}, {"compile": "auto"}], ids=str)
def test_a_job_that_compiles_nothing_is_refused(tmp_path: Path, layout: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"compiles nothing that can be saved: set layout.compile to true"):
        precompile(job_file(tmp_path, **layout), ranks=1)


@pytest.mark.long
def test_ranks_elsewhere_compile_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    found = precompile(job_file(tmp_path), ranks=2)
    assert (found.num_graphs, found.folder) == (1, tmp_path / "run" / "compile_cache")
    # Ranks that share state compile the same.
    assert [file.name for file in found.folder.glob("*.bin")] == ["rank-0.bin"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    job = Job.from_dict(tiny_job(tmp_path, layout={"compile": True}))
    for line, hits, misses in run_ranks(hits_and_misses, 2, job.to_json(), str(tmp_path / "run")):
        assert line.endswith(" read")
        assert (hits, misses) == (2, 0), "a forward and its backward"


def hits_and_misses(job_text: str, run: str) -> tuple[str | None, int, int]:
    """Return what is said of the cache, and graphs found in it and not, in a training step of this rank."""
    torch.set_num_threads(1)
    job = Job.from_json(job_text)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    line = load_cache(job, Run(run), ranks)
    training = Training.build(job, ranks)
    training.step(1, training.loader.microbatches(0))
    training.loader.close()
    return line, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
