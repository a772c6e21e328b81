"""A model as one graph trains as one process does, in one graph, with few collectives and the same state."""

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
from meshwright.parallelism.torch_private.torch_compat import local_box
from meshwright.parallelism.torch_private.torch_compile_count import compile_count
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import tiny_job, train_on_ranks

pytestmark = COMPILER_WARNINGS

_NUM_STEPS = 4
_SMALL = {"dim": 36, "num_layers": 2, "num_heads": 3, "head_dim": 12}
_OF_2: dict[str, dict[str, Any]] = {"sharded, 2 microbatches": {"layout": {"dp_shard": 2}}}
_MORE_OF_2: dict[str, dict[str, Any]] = {
    "replicated": {"layout": {"dp_replicate": 2, "microbatch_size": 4}},
    "replicated, 2 microbatches": {"layout": {"dp_replicate": 2}},
    "kept": {"layout": {"dp_shard": 2, "reshard_after_forward": "never"}},
    "recomputed": {"layout": {"dp_shard": 2, "activation_checkpoint": "full"}},
    "recomputed in part": {"layout": {"dp_shard": 2, "activation_checkpoint": "selective"}},
    "tensor parallel": {"layout": {"tp": 2, "activation_checkpoint": "selective"}},
    "keys gathered": {"layout": {"cp": 2}},
    "heads exchanged": {"layout": {"cp": 2, "cp_method": "ulysses"}},
    "loss in chunks": {"layout": {"dp_shard": 2, "loss_chunks": 2}},
    "documents": {"layout": {"dp_shard": 2}, "data": {"mask_documents": True}},
    "uneven shards, tied": {
        "model": {"source": "qwen3-0.6b", "options": {**_SMALL, "vocab_size": 257, "num_kv_heads": 3, "ffn_dim": 71}},
        "layout": {"dp_shard": 2},
    },
    "experts": {"model": {"source": "moe-4m", "options": {"num_layers": 2}}, "layout": {"dp_shard": 2}},
}
_OF_4: dict[str, dict[str, Any]] = {
    "sharded and replicated": {"layout": {"dp_shard": 2, "dp_replicate": 2, "microbatch_size": 2}},
    "sharded and replicated, 2 microbatches": {
        "layout": {"dp_shard": 2, "dp_replicate": 2, "microbatch_size": 1},
    },
    "sharded and tensor parallel": {"layout": {"dp_shard": 2, "tp": 2, "activation_checkpoint": "selective"}},
}


class Steps(NamedTuple):
    """What a rank saw of a job's first steps."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """Whole, of the first step."""
    num_graphs: list[int]
    """That each step compiled."""
    state: dict[str, Any]
    """Where this rank's part of each tensor of a checkpoint is."""


@pytest.mark.parametrize(
    ("num_ranks", "sections"),
    [
        (2, _OF_2),
        pytest.param(2, _MORE_OF_2, marks=pytest.mark.long),
        pytest.param(4, _OF_4, marks=pytest.mark.long),
    ],
    ids=["2 ranks", "more of 2 ranks", "4 ranks"],
)
def test_one_graph_trains_as_one_process(tmp_path: Path, num_ranks: int, sections: dict[str, dict[str, Any]]) -> None:
    alone, _ = run_ranks(first_steps, 1, [_job(tmp_path, one, layout={}) for one in sections.values()], [])[0]
    eager = [_job(tmp_path, one, layout={**one["layout"]}) for one in sections.values()]
    graphs = [_job(tmp_path, one, layout={**one["layout"], **_MODEL}) for one in sections.values()]
    found = run_ranks(first_steps, num_ranks, graphs, eager)
    for place, name in enumerate(sections):
        for rank in range(num_ranks):
            one, state = found[rank][0][place], found[rank][1][place]
            assert one.losses == pytest.approx(alone[place].losses, rel=5e-6), name
            for fqn, whole in alone[place].gradients.items():
                torch.testing.assert_close(one.gradients[fqn], whole, rtol=2e-4, atol=2e-7, msg=f"{name}: {fqn}")
            # One graph, whatever the number of microbatches, and none after the first step.
            assert one.num_graphs == [1, 0, 0, 0], name
            assert one.state == state, f"{name}: checkpoints differ"


@pytest.mark.long
def test_a_run_resumes_to_the_same_bits_and_in_other_layouts(tmp_path: Path) -> None:
    graph = {"layout": {"dp_shard": 2, **_MODEL}}
    whole = train_on_ranks(tiny_job(tmp_path, **graph), tmp_path / "whole", 2)
    for name, first, then in (("graph", graph, graph), ("to eager", graph, {}), ("from eager", {}, graph)):
        stopped = {**first, "train": {"stop_after": 3}}
        train_on_ranks(tiny_job(tmp_path, **stopped), tmp_path / name, 2)
        resumed = train_on_ranks(tiny_job(tmp_path, **then), tmp_path / name, 2, resume=True)
        assert resumed.losses == pytest.approx(whole.losses, rel=2e-6), name
        if first == then:
            assert resumed.parameter_hash == whole.parameter_hash


@pytest.mark.long
@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"dp_replicate": 2, "microbatch_size": 4}], ids=str)
def test_inductor_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]) -> None:
    # See test_compile.py.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    one = train_on_ranks(tiny_job(tmp_path), tmp_path / "one", 1)
    job = tiny_job(tmp_path, layout={**degrees, "compile": "model"})
    found = train_on_ranks(job, tmp_path / "graph", 2, timeout_s=400)
    assert found.losses == pytest.approx(one.losses, rel=2e-6)


_MODEL = {"compile": "model", "compile_backend": "aot_eager"}


def first_steps(jobs: list[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[list[Steps], list[dict[str, Any]]]:
    """Return what this rank sees of each job's first steps, and the state of others before theirs."""
    states = []
    for job in others:
        training = _training(Job.from_dict(job))
        states.append(_state(training))
        training.loader.close()
    return [_first_steps(Job.from_dict(job)) for job in jobs], states


def _training(job: Job) -> Training:
    return Training.build(job, Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))


def _first_steps(job: Job) -> Steps:
    torch._dynamo.reset()
    counters.clear()
    training = _training(job)
    gradients: dict[str, torch.Tensor] = {}

    def keep(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            name = name.replace("_checkpoint_wrapped_module.", "")
            gradients.setdefault(name, whole.clone())

    state = _state(training)
    training.step.observe_gradients = keep
    losses, num_graphs = [], []
    for step in range(1, _NUM_STEPS + 1):
        before = compile_count().num_graphs
        losses.append(training.step(step, training.loader.microbatches(step - 1)).loss)
        num_graphs.append(compile_count().num_graphs - before)
        training.step.observe_gradients = None
    training.loader.close()
    return Steps(losses, gradients, num_graphs, state)


def _state(training: Training) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, copies in training.state()["model"].items():
        for copy in copies if isinstance(copies, list) else [copies]:
            local, offsets = local_box(copy)
            found[name] = tuple(copy.shape), tuple(local.shape), tuple(offsets), copy.dtype
    for name, states in training.state()["optimizer"].items():
        found |= {f"{name}/{key}": [tuple(local_box(one)[0].shape) for one in each] for key, each in states.items()}
    return found


def _job(folder: Path, sections: dict[str, Any], *, layout: dict[str, Any]) -> dict[str, Any]:
    return tiny_job(folder, **{**sections, "layout": layout, "train": {"steps": _NUM_STEPS}})
