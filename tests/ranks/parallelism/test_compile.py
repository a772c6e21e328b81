"""Compiled blocks train as blocks that are not, under FSDP and under tensor parallelism."""

from pathlib import Path
from typing import Any

import pytest

from compiler_warnings import COMPILER_WARNINGS
from training_runs import FinishedRun, tiny_job, train_on_ranks

pytestmark = COMPILER_WARNINGS

_DEGREES = [{"dp_shard": 2}, {"tp": 2}]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FinishedRun]:
    folder = tmp_path_factory.mktemp("reference")
    return folder, train_on_ranks(tiny_job(folder), folder / "one", 1)


@pytest.mark.long
@pytest.mark.parametrize("degrees", _DEGREES, ids=str)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_compiled_blocks_train_the_same(
    reference: tuple[Path, FinishedRun], tmp_path: Path, degrees: dict[str, int], recompute: str
) -> None:
    layout = {**degrees, "compile": True, "compile_backend": "aot_eager", "activation_checkpoint": recompute}
    _require_the_same(reference, layout, tmp_path / "run", timeout_s=60)


@pytest.mark.long
@pytest.mark.parametrize("degrees", _DEGREES, ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_inductor_trains_the_same(
    reference: tuple[Path, FinishedRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    degrees: dict[str, int],
    recompute: str,
) -> None:
    # Kernels are compiled here, and not found where an earlier run left them; no pool of processes for each rank.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    layout = {**degrees, "compile": True, "compile_backend": "inductor", "activation_checkpoint": recompute}
    _require_the_same(reference, layout, tmp_path / "run", timeout_s=300)


def _require_the_same(
    reference: tuple[Path, FinishedRun], layout: dict[str, Any], run: Path, *, timeout_s: float
) -> None:
    folder, one = reference
    finished = train_on_ranks(tiny_job(folder, layout=layout), run, 2, timeout_s=timeout_s)
    finished.require_close(one)
