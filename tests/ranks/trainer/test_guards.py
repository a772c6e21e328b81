"""What goes wrong in silence when ranks share a model is caught by a guard, or cannot happen: a test for each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.prover.prove import ProofRequest, prove
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import TINY_MODEL, tiny_job

MIXTURE = {
    "source": "moe-4m",
    "options": {
        **{"dim": 16, "num_layers": 4, "head_dim": 4, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 16},
        **{"expert_ffn_dim": 8, "num_experts": 4, "tie_embeddings": True, "router": {"balance_loss": 0.01}},
    },
}


def job_for(folder: Path, model: dict[str, Any], layout: str, **sections: Any) -> dict[str, Any]:
    """Return a tiny job of `model` under `layout`."""
    return tiny_job(folder, model=model, layout=parse_layout(layout).to_dict(), **sections)


def build(job: dict[str, Any]) -> Training:
    return Training.build(Job.from_dict(job), Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))


def first_step_without(job: dict[str, Any], cut: str) -> None:
    """Train a step in which the gradient does not reach what is before the module `cut`, on the rank that has it."""
    training = build(job)
    for stage in training.model:
        for name, module in stage.named_modules():
            if name == cut:
                module.register_forward_hook(_detached)
    training.step(1, training.loader.microbatches(0))


def _detached(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.detach().requires_grad_()


@pytest.mark.parametrize(
    ("layout", "cut", "missing"),
    [
        ("pp=2", "embedding", r"rank 0 .*no gradient in step 1 for embedding\.weight: "),
        ("pp=2,schedule=ZBVZeroBubble", "blocks.1.ffn.down", r"rank 1 .*for blocks\.1\.ffn_norm\.weight, blocks\.1\.f"),
        ("dp_shard=2,ep=2", "blocks.3.ffn.experts", r"rank 0 .*for blocks\.3\.ffn\.experts\.gate, blocks\.3\.ffn\.e"),
    ],
)  # fmt: skip
def test_a_parameter_without_a_gradient_is_named_by_the_rank_that_has_it(
    tmp_path: Path, layout: str, cut: str, missing: str
) -> None:
    job = job_for(tmp_path, MIXTURE if "ep" in layout else _deep(), layout)
    with pytest.raises(AssertionError, match=rf"(?s){missing}"):
        run_ranks(first_step_without, 2, job, cut)


def _deep(**options: Any) -> dict[str, Any]:
    return {**TINY_MODEL, "options": {**TINY_MODEL["options"], "num_layers": 4, **options}}


def norms(job: dict[str, Any]) -> tuple[float, float]:
    """Return the gradient norm that a step reports, and that of the gradients which this rank can make whole."""
    training = build(job)
    seen: dict[str, torch.Tensor] = {}

    def keep(model: nn.Module) -> None:
        seen.update({name: parameter.grad.full_tensor() for name, parameter in canonical_parameters(model)})

    training.step.observe_gradients = keep
    reported = training.step(1, training.loader.microbatches(0)).grad_norm
    # Tied embeddings have one name on both stages, and equal gradients.
    by_name = {name: gradient for of_rank in training.ranks.gather(seen) for name, gradient in of_rank.items()}
    return reported, torch.stack([gradient.double().norm() for gradient in by_name.values()]).norm().item()


@pytest.mark.parametrize("layout", ["pp=2,dp_shard=2,ep=2", pytest.param("cp=2,tp=2,etp=2", marks=pytest.mark.long)])
def test_the_gradient_norm_counts_every_element_once(tmp_path: Path, layout: str) -> None:
    # Experts and the rest lie on different meshes, a tied embedding on two stages, norms whole on each rank.
    job = job_for(tmp_path, MIXTURE, layout)
    for reported, expected in run_ranks(norms, parse_layout(layout).num_ranks, job):
        assert reported == pytest.approx(expected, rel=1e-6)


# torch's own compiler looks at .grad of tensors that are not leaves (2.13) and its warning would stop it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_backward_leaves_what_its_second_half_reads() -> None:
    # The first backward of a block is whole here, and a later one in two parts: only then can the compiler be wrong.
    holds("pp=2,schedule=DualPipeV,compile=true,compile_backend=aot_eager")


def holds(layout: str, **request: Any) -> None:
    job = Job.from_dict({"model": _deep()})
    [proven] = prove(ProofRequest(job, [parse_layout(layout)], num_steps=2, **request), lambda _: None).layouts
    assert proven.holds, (proven.problem, proven.worst, proven.repeats)


@pytest.mark.parametrize(
    "layout", ["pp=2,cp=2,cp_method=ring", pytest.param("tp=2,cp=2,cp_method=ulysses", marks=pytest.mark.long)]
)
def test_the_same_ranks_give_the_same_bits_again(layout: str) -> None:
    holds(layout, repeat=True)


class CountCollectives(TorchDispatchMode):
    """Counts gathers of parameters and reductions of gradients; only FSDP2 calls these ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in ("allgather", "reduce_scatter", "allreduce"):
            # The step's own sums, of the loss and of the norm, are of one number.
            self.counts[kind] += kind in func._schema.name and _num_elements(args) > 1
        return func(*args, **(kwargs or {}))


def _num_elements(args: Any) -> int:
    tensors = args[0] if isinstance(args[0], list) else [args[0]]
    return sum(tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor))


def collectives_of_a_step(job: dict[str, Any]) -> dict[str, int]:
    training = build(job)
    microbatches = training.loader.microbatches(0)
    with CountCollectives() as mode:
        training.step(1, microbatches)
    return {kind: count for kind, count in mode.counts.items() if count}


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("dp_shard=2,reshard_after_forward=never,gradient_sync=step", {"allgather", "reduce_scatter"}),
        pytest.param(
            "dp_replicate=2,dp_shard=2,reshard_after_forward=never,gradient_sync=step",
            {"allgather", "reduce_scatter", "allreduce"},
            marks=pytest.mark.long,
        ),
        pytest.param("pp=2,dp_shard=2,schedule=ZBVZeroBubble", {"allgather", "reduce_scatter"}, marks=pytest.mark.long),
    ],
)
def test_a_step_of_many_microbatches_sends_what_a_step_of_few_sends(
    tmp_path: Path, layout: str, kinds: set[str]
) -> None:
    wanted = parse_layout(layout)
    few, many = (
        run_ranks(
            collectives_of_a_step,
            wanted.num_ranks,
            job_for(tmp_path, _deep(), layout, train={"global_batch_size": wanted.dp * num_microbatches}),
        )
        for num_microbatches in (wanted.num_stages, 4 * wanted.num_stages)
    )
    assert many == few
    assert set().union(*few) == kinds


def gradients_of_a_step(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    training = build(job)
    seen: dict[str, torch.Tensor] = {}

    def keep(model: nn.Module) -> None:
        for name, parameter in canonical_parameters(model):
            assert parameter.grad is not None
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            seen[name] = whole.clone()

    training.step.observe_gradients = keep
    training.step(1, training.loader.microbatches(0))
    return seen


def test_gradients_of_two_ranks_are_the_mean_of_each_ones_to_the_bit(tmp_path: Path) -> None:
    # A rank's samples are every other one of the batch; one process runs them as two microbatches.
    both = run_ranks(
        gradients_of_a_step, 2, job_for(tmp_path, TINY_MODEL, "dp_shard=2", train={"global_batch_size": 2})
    )
    [alone] = run_ranks(
        gradients_of_a_step, 1, job_for(tmp_path, TINY_MODEL, "dp_shard=1", train={"global_batch_size": 2})
    )
    for gradients in both:
        assert {name for name in alone if not torch.equal(gradients[name], alone[name])} == set()
