"""Memory pools on one CUDA device: the same bits, less of the device's memory, and what the link carries in a second.

Skipped, with the reason, where there is no CUDA device. All of it together takes less than 1 GiB of managed memory.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshwright.config.write import to_toml
from meshwright.memory.capabilities import extended_gpu_memory, managed_memory, nccl_allocator
from meshwright.memory.managed_pool import ManagedPool
from meshwright.spec.job.job import Job
from training_runs import FinishedRun, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]

SIZES = {"dim": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "ffn_dim": 1536}
POOLS = ("memory.embedding=uvm", "memory.optimizer_state=uvm")
NUM_ELEMENTS = 1 << 25


def _train(folder: Path, name: str, *overrides: str) -> tuple[FinishedRun | None, str]:
    """Return the run, None if it failed, and what it printed."""
    given: dict[str, dict[str, object]] = {
        "model": {"source": "llama-1m", "options": {"vocab_size": 32768, "max_seq_len": 1024, **SIZES}},
        "train": {"steps": 4, "seq_len": 512, "global_batch_size": 4},
        "precision": {"compute": "bfloat16"},
        "run": {"device": "cuda", "deterministic": True, "dir": str(folder / name)},
    }
    file = folder / f"{name}.toml"
    file.write_text(to_toml(Job.from_dict(tiny_job(folder, **given))))
    command = [sys.executable, "-m", "meshwright", "train", str(file), "--ranks", "1", *overrides]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    run = FinishedRun(folder / name, [0]) if ended.returncode == 0 else None
    return run, ended.stdout + ended.stderr


def _peak(run: FinishedRun) -> int:
    return max(row["memory_bytes"] for row in run.rows)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Return a run with everything on the device."""
    run, said = _train(tmp_path_factory.mktemp("plain"), "plain")
    assert run is not None, said
    return run


def _require_same(run: FinishedRun | None, other: FinishedRun, said: str) -> FinishedRun:
    assert run is not None, said
    assert run.losses == other.losses
    assert run.parameter_hash == other.parameter_hash
    return run


def _require_smaller(moved: FinishedRun, plain: FinishedRun, state_bytes: float) -> None:
    """Require that states of so many bytes a parameter have left the device."""
    num_parameters = plain.manifest.num_parameters
    print(f"peaks {_peak(plain)} and {_peak(moved)} bytes on the device, {num_parameters} parameters")
    assert _peak(plain) - _peak(moved) > 0.9 * state_bytes * num_parameters


def test_managed_memory_changes_no_bit_and_leaves_the_device(tmp_path: Path, plain: FinishedRun) -> None:
    moved, said = _train(tmp_path, "moved", *POOLS)
    assert "in managed memory of the host" in said
    _require_smaller(_require_same(moved, plain, said), plain, state_bytes=8)


def test_muon_with_bfloat16_states_is_the_same_too(tmp_path: Path) -> None:
    optimizer = "optimizer.name=muon", "optimizer.state_dtype=bfloat16"
    other, said = _train(tmp_path, "plain", *optimizer)
    assert other is not None, said
    moved, said = _train(tmp_path, "moved", *optimizer, *POOLS)
    _require_smaller(_require_same(moved, other, said), other, state_bytes=2)


def test_a_resumed_run_loads_into_managed_memory(tmp_path: Path, plain: FinishedRun) -> None:
    _, said = _train(tmp_path, "moved", "train.stop_after=2", *POOLS)
    command = [sys.executable, "-m", "meshwright", "train", str(tmp_path / "moved.toml"), "--ranks", "1", "--resume"]
    ended = subprocess.run([*command, *POOLS], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, said + ended.stdout + ended.stderr
    assert FinishedRun(tmp_path / "moved", [0]).parameter_hash == plain.parameter_hash


@pytest.mark.parametrize("pool", ["nccl", "symmetric"])
def test_communication_buffers_change_no_bit_in_a_group_of_one(tmp_path: Path, plain: FinishedRun, pool: str) -> None:
    pooled, said = _train(tmp_path, "pooled", f"memory.communication={pool}")
    if pooled is None and ("has no set_symm_mem_for_comm" in said or "has no multicast" in said):
        pytest.skip(said.strip().splitlines()[-1])
    _require_same(pooled, plain, said)


@pytest.mark.long
def test_compiled_blocks_and_updates_use_managed_memory(tmp_path: Path) -> None:
    compiles = "layout.compile=true", "layout.compile_optimizer=true"
    other, said = _train(tmp_path, "plain", *compiles)
    assert other is not None, said
    moved, said = _train(tmp_path, "moved", *compiles, *POOLS)
    _require_same(moved, other, said)


def test_a_pool_s_memory_is_the_host_s_and_kernels_use_it_in_place() -> None:
    device = torch.device("cuda", 0)
    assert managed_memory(0, is_rocm=False).is_available
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    pool = ManagedPool(device)
    tensor = pool.empty_like(torch.empty(0, device=device), torch.Size([NUM_ELEMENTS]))
    tensor.fill_(2.0).mul_(3.0)
    assert tensor.device == device
    assert float(tensor.sum()) == 6.0 * NUM_ELEMENTS
    # A few MiB of page tables and of the driver's own may come on top.
    assert before[1] - torch.cuda.mem_get_info()[0] < tensor.nbytes / 4
    assert torch.cuda.memory_allocated() - before[0] < 1 << 20


def test_the_rates_of_reads_and_writes_over_the_link() -> None:
    """What the planner takes for a kernel on managed memory is printed next to what this machine does."""
    device = torch.device("cuda", 0)
    pool = ManagedPool(device)
    host = pool.empty_like(torch.empty(0, device=device), torch.Size([NUM_ELEMENTS])).zero_()
    own = torch.zeros(NUM_ELEMENTS, device=device)
    kernels = {
        "read": lambda: own.copy_(host),
        "write": lambda: host.copy_(own),
        "read and write": lambda: host.add_(1.0),
    }
    for name, kernel in kernels.items():
        for _ in range(2):
            kernel()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            kernel()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 5
        print(f"{name}: {host.nbytes / seconds / 1e9:.1f} GB/s in each direction that it uses")
        assert seconds > 0


def test_capabilities_say_why() -> None:
    for one in (
        managed_memory(0, is_rocm=False),
        nccl_allocator(0, is_rocm=False, has_nccl=torch.distributed.is_nccl_available()),
        extended_gpu_memory(0, is_rocm=False),
    ):
        print(f"{one.name}: {one.is_available}: {one.why}")
        assert one.why
