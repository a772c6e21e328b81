"""Experts that are spread over ranks compute what they compute on one, and are balanced alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.models.build import build_architecture
from meshwright.parallelism.apply import parallelize
from meshwright.parallelism.context.context_parallel import sequence_indices
from meshwright.parallelism.data.materialize import materialize_stages
from meshwright.parallelism.expert.expert_parallel import TokenExchange
from meshwright.parallelism.gradients import Gradients
from meshwright.parallelism.mesh import Meshes, build_meshes
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_fqn, canonical_parameters
from meshwright.spec.job.sections import PrecisionSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.trainer.step.expert_load import ExpertLoad
from run_ranks import run_ranks

BATCH_SIZE, SEQ_LEN, DIM, NUM_EXPERTS = 4, 16, 16, 8
AUX_LOSSES = {"balance_loss": 0.5, "z_loss": 0.1}
GROUPED = {
    "score": "sigmoid",
    "weight_scale": 2.5,
    "num_groups": 4,
    "groups_per_token": 2,
    # So large that a wrong load shows at once.
    "bias_update_rate": 0.05,
    "balance_loss": 0.5,
}


@dataclass(frozen=True)
class Case:
    """What is trained, apart from its layout."""

    router: Mapping[str, Any] = field(default_factory=lambda: AUX_LOSSES)
    num_experts: int = NUM_EXPERTS
    num_shared_experts: int = 1
    dtype: str = "float64"
    same_tokens: bool = False
    """Whether all tokens are equal, so that all go to the same two experts."""
    latent: Mapping[str, int | None] | None = None

    def architecture(self) -> MoEArchitecture:
        """Return the sizes of three blocks, the first with a plain ffn."""
        return MoEArchitecture(
            vocab_size=32,
            dim=DIM,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2 if self.latent is None else 4,
            head_dim=4 if self.latent is None else 6,
            ffn_dim=24,
            num_experts=self.num_experts,
            experts_per_token=2,
            expert_ffn_dim=8,
            num_shared_experts=self.num_shared_experts,
            num_dense_layers=1,
            router=dict(self.router),
            latent=self.latent,
        )


@dataclass(frozen=True)
class Trained:
    """What training left, whole."""

    gradients: dict[str, Tensor]
    """Of the first step."""
    parameters: dict[str, Tensor]
    biases: dict[str, Tensor]
    metrics: list[dict[str, float]]


def build(case: Case, layout: Layout) -> tuple[Stages, Meshes]:
    """Return this rank's part of the blocks: without embedding and head, whatever goes in is data."""
    with torch.device("meta"):
        model = build_architecture(case.architecture())
    model.embedding = model.norm = model.head = None  # type: ignore[assignment]
    if case.dtype == "float64":
        model.to(torch.float64)
    meshes = build_meshes(layout, "cpu")
    precision, schedule = PrecisionSection(compute=case.dtype), build_schedule(layout, num_microbatches=2)
    stages = parallelize(model, meshes, precision, schedule, SEQ_LEN)
    materialize_stages(stages, meshes, seed=3)
    return stages, meshes


def own_part(whole_BSD: Tensor, meshes: Meshes) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a batch, and its positions (without what tp does to them)."""
    layout = meshes.layout
    positions_S = sequence_indices(SEQ_LEN, meshes.rank("cp"), layout.cp, layout.cp_method)
    own_BSD = whole_BSD.chunk(layout.dp)[meshes.dp_rank][:, positions_S]
    return own_BSD.chunk(layout.tp, 1)[meshes.rank("tp")], positions_S


def train(case: Case, layout: Layout, num_steps: int) -> Trained:
    """Return what `num_steps` of gradient descent come to, from random inputs to random targets."""
    model, meshes = build(case, layout)
    gradients, load = Gradients(model, meshes), ExpertLoad(model, meshes)
    generator = torch.Generator().manual_seed(1)
    first, metrics = {}, []
    for step in range(num_steps):
        shape = (BATCH_SIZE, SEQ_LEN, DIM)
        x_BSD, target_BSD = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        if case.same_tokens:
            x_BSD = x_BSD[:1, :1].expand(shape)
        dtype = getattr(torch, case.dtype)
        own_BSD, positions_S = own_part(x_BSD.to(dtype), meshes)
        y_BSD = model[0](own_BSD, positions_S)
        # The mean over a share of the sequence is tp times too large a part of the mean over all of it.
        ((y_BSD - own_part(target_BSD.to(dtype), meshes)[0]).square().mean() / layout.tp).backward()
        gradients.finish(1)
        if step == 0:
            first = {name: whole(parameter.grad) for name, parameter in canonical_parameters(model)}
        metrics.append(load.after_step())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return Trained(
        first,
        {name: whole(parameter) for name, parameter in canonical_parameters(model)},
        biases(model),
        metrics,
    )


def biases(model: nn.Module) -> dict[str, Tensor]:
    return {canonical_fqn(name): buffer for name, buffer in model.named_buffers() if name.endswith("router.bias")}


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def worst_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a tensor, and whose."""
    assert ours.keys() == reference.keys()
    count = sum(tensor.numel() for tensor in reference.values())
    floor = 1e-3 * math.sqrt(sum(tensor.norm().item() ** 2 for tensor in reference.values()) / count)
    return max(
        ((ours[name] - tensor).norm().item() / max(tensor.norm().item(), floor), name)
        for name, tensor in reference.items()
    )


REFERENCES: dict[tuple[str, int], Trained] = {}


def on_one_rank(case: Case, num_steps: int) -> Trained:
    """Return what one process trains, which many layouts are compared with."""
    key = repr(case), num_steps
    if key not in REFERENCES:
        (REFERENCES[key],) = run_ranks(train, 1, case, Layout(), num_steps)
    return REFERENCES[key]


def check(case: Case, num_ranks: int, degrees: dict[str, Any], num_steps: int = 1) -> list[dict[str, float]]:
    """Assert that a layout trains what one process trains; return the metrics."""
    reference = on_one_rank(case, num_steps)
    bar = 1e-11 if case.dtype == "float64" else 1e-5
    for trained in run_ranks(train, num_ranks, case, Layout(**degrees), num_steps):
        error, name = worst_error(trained.gradients, reference.gradients)
        assert error <= bar, f"gradient of {name}: {error:.1e}"
        error, name = worst_error(trained.parameters, reference.parameters)
        assert error <= bar, f"{name}: {error:.1e}"
        assert all(torch.equal(trained.biases[name], bias) for name, bias in reference.biases.items())
        for ours, theirs in zip(trained.metrics, reference.metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    return reference.metrics


@pytest.mark.parametrize(
    ("num_ranks", "degrees"),
    [
        (2, {"dp_shard": 2, "ep": 2}),
        pytest.param(4, {"dp_shard": 4, "ep": 2}, marks=pytest.mark.long),
        (4, {"dp_shard": 2, "cp": 2, "ep": 4}),
        (2, {"tp": 2}),
        pytest.param(2, {"tp": 2, "ep": 2}, marks=pytest.mark.long),
        (2, {"tp": 2, "etp": 2}),
        pytest.param(4, {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, marks=pytest.mark.long),
        pytest.param(4, {"dp_replicate": 2, "tp": 2, "ep": 2}, marks=pytest.mark.long),
        pytest.param(8, {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(num_ranks: int, degrees: dict[str, Any]) -> None:
    check(Case(), num_ranks, degrees)


@pytest.mark.parametrize("query_rank", [pytest.param(None, marks=pytest.mark.long), 8])
def test_latent_attention_shares_its_heads(query_rank: int | None) -> None:
    sizes = {"query_rank": query_rank, "kv_rank": 12, "plain_head_dim": 4, "rope_head_dim": 2, "value_head_dim": 3}
    check(Case(GROUPED, latent=sizes), 4, {"dp_shard": 2, "tp": 2, "ep": 2})


@pytest.mark.parametrize("kept", ["always", *(pytest.param(kept, marks=pytest.mark.long) for kept in ("never", 2))])
def test_experts_that_ranks_do_not_divide(kept: str | int) -> None:
    check(Case(num_experts=6), 4, {"dp_shard": 4, "reshard_after_forward": kept}, num_steps=2)


@pytest.mark.long
@pytest.mark.parametrize(
    "degrees",
    [pytest.param({"dp_shard": 4, "ep": 2}, marks=pytest.mark.long), {"dp_shard": 2, "tp": 2, "ep": 4}],
    ids=str,
)
def test_gradients_are_close_in_float32(degrees: dict[str, Any]) -> None:
    check(Case(dtype="float32"), 4, degrees)


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"dp_shard": 2, "tp": 2, "ep": 2}, marks=pytest.mark.long),
        {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
    ],
    ids=str,
)
def test_biases_and_loads_are_those_of_one_process(degrees: dict[str, Any]) -> None:
    metrics = check(Case(GROUPED), 4, degrees, num_steps=3)
    assert all(row["router_skew"] > row["router_skew_mean"] > 1 and row["balance_loss"] > 0 for row in metrics)


@pytest.mark.parametrize("num_shared_experts", [0, pytest.param(1, marks=pytest.mark.long)])
def test_ranks_whose_experts_no_token_chooses_take_part(num_shared_experts: int) -> None:
    metrics = check(Case(num_shared_experts=num_shared_experts, same_tokens=True), 4, {"dp_shard": 4, "ep": 4})
    # Two experts of eight have everything, so that two ranks of four, or more, have nothing to compute.
    assert metrics[0]["router_skew"] == NUM_EXPERTS / 2


@pytest.mark.parametrize(
    "how",
    [
        {"activation_checkpoint": "full"},
        pytest.param({"activation_checkpoint": "selective"}, marks=pytest.mark.long),
        pytest.param({"compile": True, "compile_backend": "aot_eager"}, marks=pytest.mark.long),
    ],
    ids=str,
)
# What torch's own compiler does (2.13), and a warning would stop it.
@pytest.mark.long
@DYNAMO_WARNINGS
def test_recomputed_and_compiled_experts_compute_the_same(how: dict[str, Any]) -> None:
    check(Case(GROUPED), 4, {"dp_shard": 2, "tp": 2, "ep": 4, **how}, num_steps=2)


COUNTS = [[3, 0, 2, 5], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 4, 1]]
"""Rows of each rank for each expert; nothing goes to the second expert, and nothing comes from the second rank."""


class Scale(nn.Module):
    """Experts that multiply by a number each: what takes the wrong way shows."""

    def __init__(self, factors_E: Tensor) -> None:
        super().__init__()
        self.factors_E = nn.Parameter(factors_E)

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        return rows_RD * self.factors_E.repeat_interleave(counts_E)[:, None]


def exchange(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return output, gradient of the rows, gradient of the experts of this rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    counts_E = torch.tensor(COUNTS[rank])
    first = sum(sum(counts) for counts in COUNTS[:rank])
    rows_RD = (
        torch.arange(first, first + sum(COUNTS[rank]), dtype=dtype)[:, None].expand(-1, 3).clone().requires_grad_()
    )
    experts = Scale(torch.arange(1.0, 5.0, dtype=dtype).chunk(num_ranks)[rank])
    output_RD = TokenExchange(dist.group.WORLD, 1)(experts, rows_RD, counts_E)
    (output_RD * rows_RD.detach()).sum().backward()
    return output_RD.detach(), rows_RD.grad, experts.factors_E.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_come_back_in_order_and_so_do_their_gradients(dtype: torch.dtype) -> None:
    outputs, row_gradients, expert_gradients = zip(*run_ranks(exchange, 4, dtype), strict=True)
    expert_R = torch.arange(4).repeat(4).repeat_interleave(torch.tensor(COUNTS).flatten())
    row_R = torch.arange(len(expert_R), dtype=torch.float64)
    factor_R = 1.0 + expert_R
    assert torch.equal(torch.cat(outputs)[:, 0].double(), factor_R * row_R)
    assert torch.equal(torch.cat(row_gradients)[:, 2].double(), factor_R * row_R)
    sums_E = torch.zeros(4, dtype=torch.float64).index_add(0, expert_R, 3 * row_R.square())
    torch.testing.assert_close(torch.cat(expert_gradients).double(), sums_E, rtol=1e-2, atol=0)


def load_of_stages() -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and biases after a step in which expert e of block b got e + b rows on each rank."""
    model, meshes = build(Case(GROUPED), Layout(pp=2, dp_shard=2, ep=2, stage_boundaries=(1,)))
    load = ExpertLoad(model, meshes)
    for name, buffer in model.named_buffers():
        if name.endswith("load_E"):
            buffer.copy_(torch.arange(NUM_EXPERTS) + int(name.split(".")[3]))
    metrics = load.after_step()
    assert not any(buffer.any() for name, buffer in model.named_buffers() if not name.endswith("bias"))
    return metrics, biases(model)


def test_the_load_of_all_stages_is_known_to_all_ranks() -> None:
    # The first stage has no experts: its ranks must take part all the same.
    results = run_ranks(load_of_stages, 4)
    for metrics, _ in results:
        # 1 to 8 rows of a mean of 4.5, and 2 to 9 of a mean of 5.5.
        assert metrics == {
            "router_skew": pytest.approx(8 / 4.5),
            "router_skew_mean": pytest.approx((8 / 4.5 + 9 / 5.5) / 2),
            "tokens_dropped": 0.0,
            "tokens_padded": 0.0,
        }
    rate = GROUPED["bias_update_rate"]
    expected_E = torch.tensor([rate] * 4 + [-rate] * 4, dtype=torch.float64)
    assert [len(of_rank) for _, of_rank in results] == [0, 0, 2, 2]
    assert all(torch.equal(bias, expected_E) for _, of_rank in results for bias in of_rank.values())
