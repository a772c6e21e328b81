"""A compiled loss and a compiled optimizer train as eager ones do, and compile nothing after the second step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from compiler_warnings import COMPILER_WARNINGS
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.parallelism.torch_private.torch_compile_count import compile_count
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import tiny_job, train_on_ranks

pytestmark = COMPILER_WARNINGS

_NUM_STEPS = 4
_BOTH = {"compile_loss": True, "compile_optimizer": True, "compile_backend": "aot_eager"}
_OF_2: dict[str, dict[str, Any]] = {
    "sharded, 2 microbatches": {"dp_shard": 2},
}
_MORE_OF_2: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tp": 2},
    "replicated": {"dp_replicate": 2},
    "pipeline": {"pp": 2},
    "split backward": {"pp": 2, "schedule": "ZBVZeroBubble", "microbatch_size": 1},
    "keys gathered": {"cp": 2},
    "loss in chunks": {"dp_shard": 2, "loss_chunks": 3},
    "loss in chunks, tensor parallel": {"tp": 2, "loss_chunks": 3},
    "blocks too": {"dp_shard": 2, "compile": True},
    "host offload": {"dp_shard": 2, "cpu_offload": True},
}


class Steps(NamedTuple):
    """What a rank saw of a job's first steps."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]
    """Whole, after the last step; of this rank's stages."""
    num_graphs: list[int]
    """That each step compiled."""


@pytest.mark.parametrize("layouts", [_OF_2, pytest.param(_MORE_OF_2, marks=pytest.mark.long)], ids=["usual", "more"])
def test_compiled_loss_and_optimizer_train_as_one_process(tmp_path: Path, layouts: dict[str, dict[str, Any]]) -> None:
    [alone] = run_ranks(first_steps, 1, [_job(tmp_path, {})])[0]
    found = run_ranks(first_steps, 2, [_job(tmp_path, {**layout, **_BOTH}) for layout in layouts.values()])
    for rank in range(2):
        for name, one in zip(layouts, found[rank], strict=True):
            assert one.losses == pytest.approx(alone.losses, rel=5e-6), name
            assert one.grad_norms == pytest.approx(alone.grad_norms, rel=2e-5), name
            for fqn, whole in one.parameters.items():
                torch.testing.assert_close(whole, alone.parameters[fqn], rtol=1e-4, atol=1e-5, msg=f"{name}: {fqn}")
            assert one.num_graphs[0] > 0, name
            assert one.num_graphs[2:] == [0, 0], f"{name}: {one.num_graphs}"


@pytest.mark.long
@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "loss_chunks": 3}], ids=str)
def test_inductor_trains_the_same_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]
) -> None:
    # See test_compile.py.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    one = train_on_ranks(tiny_job(tmp_path), tmp_path / "one", 1)
    layout = {**degrees, **_BOTH, "compile_backend": "inductor"}
    whole = train_on_ranks(tiny_job(tmp_path, layout=layout), tmp_path / "whole", 2, timeout_s=400)
    assert whole.losses == pytest.approx(one.losses, rel=5e-6)
    stopped = tiny_job(tmp_path, layout=layout, train={"stop_after": 3})
    train_on_ranks(stopped, tmp_path / "parts", 2, timeout_s=400)
    resumed = train_on_ranks(tiny_job(tmp_path, layout=layout), tmp_path / "parts", 2, resume=True, timeout_s=400)
    assert resumed.parameter_hash == whole.parameter_hash


def first_steps(jobs: list[dict[str, Any]]) -> list[Steps]:
    """Return what this rank sees of each job's first steps."""
    return [_first_steps(Job.from_dict(job)) for job in jobs]


def _first_steps(job: Job) -> Steps:
    torch._dynamo.reset()
    counters.clear()
    training = Training.build(job, Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    losses, norms, num_graphs = [], [], []
    for step in range(1, _NUM_STEPS + 1):
        before = compile_count().num_graphs
        result = training.step(step, training.loader.microbatches(step - 1))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        num_graphs.append(compile_count().num_graphs - before)
    training.loader.close()
    return Steps(losses, norms, _whole_parameters(training.model), num_graphs)


def _whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in canonical_parameters(model):
        whole = parameter.detach()
        found[name] = (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()
    return found


def _job(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    # A usual eps makes of rounding in a gradient of zero a step like any other.
    return tiny_job(folder, layout=layout, train={"steps": _NUM_STEPS}, optimizer={"eps": 1e-3})
