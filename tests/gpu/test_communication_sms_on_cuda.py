"""A limit on the CTAs of NCCL's kernels on one CUDA device: it reaches every group, and a run trains to the same bits.

Skipped, with the reason, where there is no CUDA device. One device communicates nothing: what fewer CTAs cost is not
measured here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.config.write import to_toml
from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.torch_private.torch_nccl import max_ctas_of, meshes_limited_like, new_group_like
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from training_runs import FinishedRun, tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]
LIMIT = 4


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(minutes=2)
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_every_group_of_the_mesh_and_those_made_next_to_it_are_limited() -> None:
    meshes = build_meshes(Layout(communication_sms=LIMIT), "cuda")
    groups = [meshes.group(axis) for axis in ("pp", "dp_replicate", "fsdp", "tp", "cp", "ep", "expert_dp_shard")]
    groups.append(new_group_like(groups[0], [0]))
    with meshes_limited_like(groups[0]):
        groups.append(init_device_mesh("cuda", (1, 1)).get_group(0))
    for group in groups:
        assert max_ctas_of(group) == LIMIT or group is dist.group.WORLD
        assert group._get_backend(torch.device("cuda")).options._timeout == timedelta(minutes=2)
        ones = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(ones, group=group)
        assert ones.sum().item() == 1 << 20
    assert max_ctas_of(meshes.group("tp")) == LIMIT
    assert max_ctas_of(build_meshes(Layout(), "cuda").group("tp")) is None


def test_a_run_with_fewer_sms_trains_to_the_same_bits(tmp_path: Path) -> None:
    runs = []
    for name, overrides in (("usual", ()), ("limited", (f"layout.communication_sms={LIMIT}",))):
        file = tmp_path / f"{name}.toml"
        run = {"device": "cuda", "deterministic": True, "dir": str(tmp_path / name)}
        file.write_text(to_toml(Job.from_dict(tiny_job(tmp_path, run=run))))
        subprocess.run([sys.executable, "-m", "meshwright", "train", str(file), "--ranks", "1", *overrides], check=True)
        runs.append(FinishedRun(tmp_path / name, [0]))
    usual, limited = runs
    assert limited.losses == usual.losses
    assert limited.parameter_hash == usual.parameter_hash
