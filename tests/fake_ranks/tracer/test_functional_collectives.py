"""Functional collectives are recorded once each, in eager code and in what torch.compile makes kernels of."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import functional_programs
from meshwright.spec.trace.trace import RecordKind, Trace
from traced_programs import WORLD_SIZE, ops, trace_of, trace_programs

FLOAT_BYTES = 4
QUICK = ["functional/eager", "functional/compiled", "resharded"]
LONG = ["tensor_parallel/eager", "tensor_parallel/compiled"]
IN_PLACE = {
    "c10d.allreduce_.default": "_c10d_functional.all_reduce.default",
    "c10d._allgather_base_.default": "_c10d_functional.all_gather_into_tensor.default",
}
"""What torch.compile makes of a program's own collectives."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the trace of each program."""
    return trace_programs(tmp_path_factory.mktemp("traced"), functional_programs.__name__, *QUICK)


@pytest.fixture(scope="module")
def of_tensor_parallelism(folder: Path) -> Path:
    """Return the same folder with those traces, too."""
    return trace_programs(folder, functional_programs.__name__, *LONG)


def collectives(found: Trace) -> list[tuple[str, int, str]]:
    """Return name, bytes and what ranks agree on of each collective, in order."""
    columns = found.records
    rows = zip(columns.kind, columns.signature, columns.num_bytes, strict=True)
    signatures = [
        (found.signatures[at], int(num_bytes)) for kind, at, num_bytes in rows if kind == RecordKind.COLLECTIVE
    ]
    return [(IN_PLACE.get(one.op, one.op), num_bytes, one.agreed) for one, num_bytes in signatures]


@pytest.mark.long
@pytest.mark.usefixtures("of_tensor_parallelism")
@pytest.mark.parametrize("program", ["functional", "tensor_parallel"])
def test_compiled_code_communicates_as_eager_code_does(folder: Path, program: str) -> None:
    eager, compiled = trace_of(folder, f"{program}/eager"), trace_of(folder, f"{program}/compiled")
    assert Counter(collectives(compiled)) == Counter(collectives(eager))
    # Each of them is waited for.
    started, waited = (
        set(compiled.records.work[compiled.records.kind == kind].tolist())
        for kind in (RecordKind.COLLECTIVE, RecordKind.WAIT)
    )
    assert started == waited != set()


@pytest.mark.long
def test_what_is_around_collectives_is_fused_and_multiplied_once(folder: Path) -> None:
    require_fused(folder, "functional")


@pytest.mark.long
def test_so_it_is_under_torchs_own_tensor_parallelism(of_tensor_parallelism: Path) -> None:
    require_fused(of_tensor_parallelism, "tensor_parallel")


def require_fused(folder: Path, program: str) -> None:
    eager, compiled = ops(trace_of(folder, f"{program}/eager")), ops(trace_of(folder, f"{program}/compiled"))
    for product in ("aten.mm.default", "aten.addmm.default"):
        assert compiled[product] == eager[product]
    assert not any(name.startswith(("aten.mul.", "aten.relu.")) for name in compiled)
    assert any(name.startswith("inductor.fused(") for name in compiled)


@pytest.mark.long
def test_only_what_is_read_again_is_copied_before_it_is_reduced(of_tensor_parallelism: Path) -> None:
    folder = of_tensor_parallelism
    kernels = ops(trace_of(folder, "tensor_parallel/compiled"))
    assert not any(name.startswith("inductor.fused(") and "clone" in name for name in kernels)
    assert any("clone" in name for name in ops(trace_of(folder, "functional/compiled")))


@pytest.mark.long
def test_another_sharded_dimension_is_an_all_to_all(folder: Path) -> None:
    found = trace_of(folder, "resharded")
    num_bytes = 8 * functional_programs.WIDTH**2 * FLOAT_BYTES
    assert collectives(found) == [("_c10d_functional.all_to_all_single.default", num_bytes, "")] * 2
    # Before and after it the dimensions change their order in memory.
    assert ops(found)["aten.clone.default"] == 4


@pytest.mark.parametrize(
    "program",
    [pytest.param("skipped", marks=pytest.mark.long), pytest.param("not_resharded", marks=pytest.mark.long)],
)
def test_ranks_that_do_not_meet_are_told(program: str) -> None:
    build = f"{functional_programs.__file__}:{program}"
    command = [sys.executable, "-m", "meshwright", "simulate", "--build", build, "--ranks", str(WORLD_SIZE)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 2
    assert f"culprit: rank {1 if program == 'skipped' else 2}" in " ".join(found.stdout.split())
