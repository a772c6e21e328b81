"""The mixture of experts against one written out token by token; its router's rules, losses and statistics."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.models.build import build_architecture
from meshwright.models.clamped_swiglu import clamped_swiglu
from meshwright.models.contract import next_token_loss, require_shardable
from meshwright.models.grouped_matmul import grouped_matmul
from meshwright.models.initial import Constant, initialize
from meshwright.models.moe import Experts, MixtureOfExperts, TopKRouter
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.op import GroupedMatmul
from meshwright.spec.model.presets import PRESETS

SIZES = {"vocab_size": 97, "dim": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_dim": 24}
DEEPSEEK = {
    "score": "sigmoid",
    "weight_scale": 2.5,
    "num_groups": 4,
    "groups_per_token": 2,
    "bias_update_rate": 0.001,
}


def architecture(router: dict[str, Any] | None = None, **changes: Any) -> MoEArchitecture:
    experts = {"num_experts": 8, "experts_per_token": 3, "expert_ffn_dim": 12, "router": router or {}}
    return MoEArchitecture.from_dict({**SIZES, **experts, **changes})


def mixture(router: dict[str, Any] | None = None, dtype: torch.dtype = torch.float64) -> MixtureOfExperts:
    torch.manual_seed(0)
    one = MixtureOfExperts(architecture(router))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_(0.0, 0.4)
        if one.router.bias is not None:
            one.router.bias.normal_(0.0, 0.3)
    return one.to(dtype)


def tokens(dtype: torch.dtype = torch.float64, batch_size: int = 2) -> Tensor:
    return torch.randn(batch_size, 10, 16, dtype=dtype, generator=torch.Generator().manual_seed(1))


def expected_choice(router: TopKRouter, score_E: Tensor) -> list[int]:
    """Return the experts of one token, by sorting what DeepSeek-V3's report describes."""
    chosen_by = (score_E + (0 if router.bias is None else router.bias)).tolist()
    size = len(chosen_by) // router.rules.num_groups
    groups = [list(range(start, start + size)) for start in range(0, len(chosen_by), size)]
    groups.sort(key=lambda group: -sum(sorted(chosen_by[expert] for expert in group)[-2:]))
    allowed = [expert for group in groups[: router.rules.groups_per_token] for expert in group]
    return sorted(allowed, key=lambda expert: -chosen_by[expert])[: router.experts_per_token]


def expected_output(one: MixtureOfExperts, x_D: Tensor) -> Tensor:
    """Return what one token gets, one expert at a time."""
    logits_E = one.router.weight @ x_D
    score_E = logits_E.softmax(0) if one.router.rules.score == "softmax" else logits_E.sigmoid()
    chosen = expected_choice(one.router, score_E)
    total = sum(score_E[expert] for expert in chosen) if one.router.rules.normalize_weights else 1.0
    return sum(
        score_E[expert] / total * one.router.rules.weight_scale * expected_expert(one.experts, expert, x_D)
        for expert in chosen
    )  # type: ignore[return-value]


def expected_expert(experts: Experts, expert: int, x_D: Tensor) -> Tensor:
    gated_F = F.silu(experts.gate[expert] @ x_D) * (experts.up[expert] @ x_D)
    down_D: Tensor = experts.down[expert] @ gated_F
    return down_D


ROUTERS = {
    "mixtral": {},
    "not normalised": {"normalize_weights": False},
    "deepseek": DEEPSEEK,
    "groups of softmax": {"num_groups": 2},
    "groups of one": {"num_groups": 8, "groups_per_token": 4},
}


def require_one_token_at_a_time(one: MixtureOfExperts, x_BSD: Tensor, output: Callable[[Tensor], Tensor]) -> None:
    """Compare outputs and gradients of a mixture with those of `output` of each token."""
    ours_BSD = one(x_BSD.requires_grad_())
    theirs_BSD = torch.stack([output(x_D) for x_D in x_BSD.flatten(0, 1)]).view_as(x_BSD)
    torch.testing.assert_close(ours_BSD, theirs_BSD, rtol=1e-12, atol=1e-12)
    variables, direction = (x_BSD, *one.parameters()), torch.randn_like(ours_BSD)
    ours = torch.autograd.grad(ours_BSD, variables, direction)
    for gradient, theirs in zip(ours, torch.autograd.grad(theirs_BSD, variables, direction), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ROUTERS)
def test_output_and_gradients_are_those_of_one_token_at_a_time(name: str) -> None:
    router = ROUTERS[name] | ({"groups_per_token": 1} if name == "groups of softmax" else {})
    one = mixture(router)
    require_one_token_at_a_time(one, tokens(), partial(expected_output, one))


def test_biases_and_a_clamped_activation_are_those_of_one_token_at_a_time() -> None:
    torch.manual_seed(0)
    one, x_BSD = (
        MixtureOfExperts(architecture(), has_bias=True, activation=partial(clamped_swiglu, limit=0.5)),
        tokens(),
    )
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_(0.0, 0.4)
    one, experts = one.double(), one.experts
    assert experts.gate_bias is not None
    assert experts.up_bias is not None
    assert experts.down_bias is not None

    def expert_output(index: int, x_D: Tensor) -> Tensor:
        gate_F = (experts.gate[index] @ x_D + experts.gate_bias[index]).clamp(max=0.5)
        up_F = (experts.up[index] @ x_D + experts.up_bias[index]).clamp(-0.5, 0.5)
        down_D: Tensor = experts.down[index] @ ((up_F + 1) * gate_F * torch.sigmoid(1.702 * gate_F))
        return down_D + experts.down_bias[index]

    def output(x_D: Tensor) -> Tensor:
        assert one.router.logit_bias is not None
        logits_K, chosen = (one.router.weight @ x_D + one.router.logit_bias).topk(3)
        pairs = zip(logits_K.softmax(0), chosen.tolist(), strict=True)
        return sum(weight * expert_output(index, x_D) for weight, index in pairs)  # type: ignore[return-value]

    require_one_token_at_a_time(one, x_BSD, output)


def test_shared_experts_see_every_token() -> None:
    one, x_BSD = mixture(), tokens()
    plain_BSD = one(x_BSD)
    one.shared = torch.nn.Linear(16, 16, dtype=torch.float64)
    torch.testing.assert_close(one(x_BSD), plain_BSD + one.shared(x_BSD))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    one, x_BSD = mixture({"bias_update_rate": 0.1, "normalize_weights": False}), tokens()
    assert one.router.bias is not None
    one.router.bias.zero_()
    one.router.bias[5] = 100.0
    routing = one.router(x_BSD)
    assert (routing.expert_TK == 5).any(-1).all()
    scores_TE = (x_BSD @ one.router.weight.T).softmax(-1).flatten(0, 1)
    torch.testing.assert_close(routing.weight_TK, scores_TE.gather(-1, routing.expert_TK))


def test_the_bias_follows_the_load() -> None:
    router = mixture(DEEPSEEK, torch.float32).router
    assert router.bias is not None
    before = router.bias.clone()
    router.update_bias(torch.tensor([0, 4, 4, 4, 4, 4, 4, 8]))
    torch.testing.assert_close(router.bias - before, torch.tensor([1.0, 0, 0, 0, 0, 0, 0, -1]) * 0.001)


def test_the_bias_balances() -> None:
    router = mixture({"bias_update_rate": 0.02, "score": "sigmoid"}, torch.float32).router
    x_BSD = tokens(torch.float32, batch_size=40)
    skews = []
    for _ in range(60):
        router.load_E.zero_()
        router(x_BSD)
        skews.append((router.load_E.max() / router.load_E.mean()).item())
        router.update_bias(router.load_E)
    assert skews[0] > 1.3
    assert skews[-1] < 1.1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([8, 5]), st.sampled_from([16, 3]))
def test_grouped_matmul_is_a_loop(counts: list[int], rows_width: int, width: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        generator = torch.Generator().manual_seed(sum(counts))
        rows_RI = torch.randn(sum(counts), rows_width, dtype=dtype, generator=generator, requires_grad=True)
        weight_EOI = torch.randn(len(counts), width, rows_width, dtype=dtype, generator=generator, requires_grad=True)
        ours_RO = grouped_matmul(rows_RI, weight_EOI, torch.tensor(counts))
        parts = [rows @ weight.T for rows, weight in zip(rows_RI.split(counts), weight_EOI, strict=True)]
        theirs_RO = torch.cat(parts)
        torch.testing.assert_close(ours_RO, theirs_RO)
        direction = torch.ones_like(ours_RO)
        ours = torch.autograd.grad(ours_RO, (rows_RI, weight_EOI), direction)
        for gradient, theirs in zip(
            ours, torch.autograd.grad(theirs_RO, (rows_RI, weight_EOI), direction), strict=True
        ):
            torch.testing.assert_close(gradient, theirs)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.sampled_from([2, 4, 8]))
def test_padding_changes_no_number(counts: list[int], alignment: int) -> None:
    experts = mixture().experts
    rows_RD = torch.randn(sum(counts), 16, dtype=torch.float64, requires_grad=True)
    plain_RD = experts(rows_RD, torch.tensor(counts))
    assert experts.padded_rows == 0
    experts.alignment = alignment
    padded_RD = experts(rows_RD, torch.tensor(counts))
    assert experts.padded_rows == sum(-count % alignment for count in counts)
    torch.testing.assert_close(padded_RD, plain_RD, rtol=1e-13, atol=1e-13)
    variables = (rows_RD, *experts.parameters())
    padded = torch.autograd.grad(padded_RD.square().sum(), variables)
    for gradient, plain in zip(padded, torch.autograd.grad(plain_RD.square().sum(), variables), strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=1e-12)


def gradients(one: MixtureOfExperts, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients to the input and the router of an output that wants nothing: those of the losses alone."""
    x_BSD = x_BSD.clone().requires_grad_()
    return torch.autograd.grad(one(x_BSD), (x_BSD, one.router.weight), torch.zeros_like(x_BSD))  # type: ignore[return-value]


def test_losses_are_those_of_the_formulas() -> None:
    one, x_BSD = mixture({**DEEPSEEK, "balance_loss": 0.3, "z_loss": 0.2}), tokens()
    x_in = x_BSD.clone().requires_grad_()
    logits_BSE = x_in @ one.router.weight.T
    scores_BSE = logits_BSE.sigmoid()
    balance = torch.zeros((), dtype=torch.float64)
    for score_SE in scores_BSE:
        chosen = [expert for score_E in score_SE for expert in expected_choice(one.router, score_E)]
        share_E = (score_SE / score_SE.sum(1, keepdim=True)).mean(0)
        for expert in range(8):
            frequency = 8 / (3 * len(score_SE)) * chosen.count(expert)
            balance = balance + frequency * share_E[expert] / len(scores_BSE)
    z_loss = logits_BSE.exp().sum(-1).log().square().mean()
    expected = torch.autograd.grad(0.3 * balance + 0.2 * z_loss, (x_in, one.router.weight))
    torch.testing.assert_close(gradients(one, x_BSD), expected)
    torch.testing.assert_close(one.router.balance_loss, balance.detach().view(1))
    torch.testing.assert_close(one.router.z_loss, z_loss.detach().view(1))
    assert one.router.num_forwards == 1


def test_losses_are_averages_over_sequences() -> None:
    one, x_BSD = mixture({"balance_loss": 0.3, "z_loss": 0.2}), tokens()
    whole = gradients(one, x_BSD)[1]
    parts = [gradients(one, x_SD[None])[1] for x_SD in x_BSD]
    torch.testing.assert_close(whole, sum(parts) / 2)


def test_ranks_that_share_sequences_average_to_the_whole() -> None:
    one, x_BSD = mixture({"balance_loss": 0.3, "z_loss": 0.2}), tokens()
    whole, balance = gradients(one, x_BSD)[1], one.router.balance_loss.clone()
    one.reset_statistics()
    counts_BE = torch.stack([one.router(x_SD[None]).counts_E for x_SD in x_BSD]).double()
    one.reset_statistics()
    # What an all-reduce over the two ranks would return to both; each adds half of its losses.
    one.router.share_counts, one.router.loss_scale = lambda _: counts_BE, 0.5
    parts = [gradients(one, part_BSD)[1] for part_BSD in x_BSD.split(5, dim=1)]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(one.router.balance_loss / one.router.num_forwards, balance)


def test_a_balanced_router_has_the_least_loss() -> None:
    one = mixture({"balance_loss": 1.0})
    with torch.no_grad():
        one.router.weight.zero_()
    one(tokens())
    assert one.router.balance_loss == pytest.approx(1.0)


def test_statistics_count_in_training_only() -> None:
    one, x_BSD = mixture({"balance_loss": 1.0}), tokens()
    one.eval()
    one(x_BSD)
    assert one.router.load_E.sum() == one.router.num_forwards == 0
    one.train()
    one(x_BSD)
    assert one.router.load_E.sum() == 2 * 10 * 3
    one.reset_statistics()
    assert one.router.load_E.sum() == one.router.balance_loss == one.router.num_forwards == 0


def test_the_router_computes_in_float32_at_least() -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        one = mixture(DEEPSEEK).to(dtype)
        assert one.router(tokens(dtype)).weight_TK.dtype == wide
        assert one(tokens(dtype)).dtype == dtype


def test_a_model_of_mixtures_trains() -> None:
    router = {**DEEPSEEK, "balance_loss": 0.01, "z_loss": 0.001}
    shape = architecture(router, num_dense_layers=1, num_shared_experts=1)
    with torch.device("meta"):
        require_shardable(build_architecture(shape))
    model = build_architecture(shape)
    initialize(model, seed=0)
    assert not hasattr(model.blocks[0].ffn, "router")
    for name, _ in model.named_buffers():
        assert model.initial(name) == Constant(0.0)
    assert set(model.state_dict()) - {name for name, _ in model.named_parameters()} == {
        "blocks.1.ffn.router.bias",
        "blocks.2.ffn.router.bias",
    }
    tokens_BS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(20):
        loss = next_token_loss(model(tokens_BS), tokens_BS)
        loss.backward()
        if step == 0:
            assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", ["moe-4m", "mla-moe-4m"])
def test_every_op_with_weights_names_its_module(name: str) -> None:
    with torch.device("meta"):
        sizes = {fqn: p.numel() for fqn, p in build_architecture(PRESETS[name]).named_parameters()}
    priced: dict[str, int] = {}
    index = 0
    for group in model_spec(PRESETS[name]).groups:
        for _ in range(group.count):
            prefix = f"{group.name}.{index}." if group.name else ""
            index += bool(group.name)
            for op in group.ops:
                suffix = "" if isinstance(op, GroupedMatmul) else ".weight"
                priced |= {f"{prefix}{op.name}{suffix}": op.num_parameters} if op.num_parameters else {}
    assert priced == sizes


def test_the_ops_of_gpt_oss_have_the_weights_of_its_blocks() -> None:
    architecture = PRESETS["gpt-oss-4m"]
    with torch.device("meta"):
        blocks = build_architecture(architecture).blocks
    priced = [group.num_parameters for group in model_spec(architecture).groups[1:-1] for _ in range(group.count)]
    assert priced == [sum(p.numel() for p in block.parameters()) for block in blocks]


# torch 2.13's compiler makes an instance of its own of every autograd.Function that it traces.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compiler_takes_it_whole(dtype: torch.dtype, alignment: int) -> None:
    one, x_BSD = mixture({**DEEPSEEK, "balance_loss": 0.1}, dtype), tokens(dtype).requires_grad_()
    one.experts.alignment = alignment
    expected = torch.autograd.grad(one(x_BSD).square().sum(), (x_BSD, *one.parameters()))
    compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x_BSD).square().sum(), (x_BSD, *one.parameters())), expected
    )
    assert one.router.num_forwards == 2
    assert one.router.load_E.sum() == 2 * 2 * 10 * 3
