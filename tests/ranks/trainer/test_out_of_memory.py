"""A rank that has no memory left says what holds it, what was predicted, and the key that the planner would change."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import OutOfMemory
from meshwright.hardware.machine import resident_bytes
from meshwright.units import MiB
from run_ranks import run_ranks
from training_runs import tiny_job, train_on_this_rank

SIZES = {"dim": 256, "num_layers": 8, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "ffn_dim": 1024}
GIVEN_BYTES = 400 * MiB
TABLE = ("parameters", "gradients", "optimizer states", "activations", "buffers", "communication", "unaccounted")


def _data_bytes() -> int:
    """Return the private memory of this process, which RLIMIT_DATA bounds."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _train_with_little_memory(job: dict[str, Any], folder: str) -> tuple[str, int]:
    """Return what a rank says that may take GIVEN_BYTES more than it has, and what it holds afterwards."""
    before = resident_bytes()
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + GIVEN_BYTES, limit[1]))
    try:
        train_on_this_rank(job, folder, resume=False)
    except OutOfMemory as error:
        return str(error), resident_bytes() - before
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limit)
    raise AssertionError("the job fits")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux bounds and tells a process's memory")
def test_a_failed_allocation_ends_with_a_table_and_a_key(tmp_path: Path) -> None:
    job = tiny_job(
        tmp_path,
        model={"source": "llama-1m", "options": SIZES},
        train={"steps": 2, "seq_len": 512, "global_batch_size": 16},
        layout={"dp_shard": 1, "microbatch_size": 16},
    )
    [(text, _)] = run_ranks(_train_with_little_memory, 1, job, str(tmp_path / "run"))
    first, head, *rows = text.splitlines()
    assert first.startswith("rank 0 of 1 is out of memory: ")
    assert head.split() == ["predicted", "present", "difference"]
    cells = {row[:20].strip(): row[20:].split("  ") for row in rows[: len(TABLE) + 1]}
    assert [*cells] == [*TABLE, "total"]
    parameters = re.split(r"\s{2,}", rows[0].strip())
    assert parameters[1] == parameters[2] != "0 B"
    assert "-" not in {re.split(r"\s{2,}", row.strip())[3] for row in rows[: len(TABLE)]}
    assert re.match(r"set layout\.\w+=\w+: predicted to take [\d.]+ \w+ and .* a step in place of ", rows[-1])
