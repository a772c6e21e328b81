"""OuterOptimizer: torch's Nesterov SGD on the mean change, exact where nothing is to be changed, in even fragments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.spec.job.replicas_section import ReplicasSection
from meshwright.trainer.optimizer.outer_optimizer import OuterOptimizer, split


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def section_of(**keys: object) -> ReplicasSection:
    return ReplicasSection.from_dict({"independent": True, "sync_every": 4, **keys})


def change_parameters(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=10 ** torch.randint(-6, 3, ()).item())


def sync(outer: OuterOptimizer, fragment: int, others: list[Tensor] | None = None, kept_share: float = 0.0) -> None:
    """Sync a fragment with the changes of `others`; None is a replica that is alone."""
    local = outer.local(fragment)
    mean = None
    if others is not None:
        mean = torch.stack([outer.change(fragment, local), *others]).mean(0).float()
    outer.update(fragment, local, mean, kept_share)


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_update_is_torchs_nesterov_sgd(rate: float, momentum: float) -> None:
    model, reference = model_of(0), model_of(0)
    outer = OuterOptimizer(model, section_of(outer_learning_rate=rate, outer_momentum=momentum))
    sgd = torch.optim.SGD(reference.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    for round_ in range(4):
        torch.manual_seed(round_)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        other = [1e-2 * torch.randn(sum(parameter.numel() for parameter in model.parameters()))]
        mean = torch.stack([outer.change(0, outer.local(0)), *other]).mean(0)
        named, offset = dict(reference.named_parameters()), 0
        for name in outer.fragments[0]:
            size = named[name].numel()
            named[name].grad = mean[offset : offset + size].view_as(named[name])
            offset += size
        sgd.step()
        sync(outer, 0, other)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_one_replica_with_rate_1_keeps_its_parameters_to_the_bit() -> None:
    model = model_of(1)
    outer = OuterOptimizer(model, section_of(outer_learning_rate=1.0, outer_momentum=0.0, fragments=2))
    for seed in range(5):
        # Changes of signs and of orders of magnitude, at which outer - (outer - own) is not own.
        change_parameters(model, seed)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for fragment in range(2):
            sync(outer, fragment)
        for old, new in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, new)


def test_a_fragment_changes_nothing_but_its_own_parameters() -> None:
    model = model_of(2)
    outer = OuterOptimizer(model, section_of(fragments=2))
    change_parameters(model, 3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sync(outer, 1)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(outer.fragments[1])


def test_a_kept_share_mixes_own_and_outer_parameters() -> None:
    model = model_of(4)
    outer = OuterOptimizer(model, section_of())
    change_parameters(model, 5)
    own = [parameter.detach().clone() for parameter in model.parameters()]
    sync(outer, 0, kept_share=0.25)
    state = outer.state()
    for (name, parameter), before in zip(model.named_parameters(), own, strict=True):
        torch.testing.assert_close(parameter.detach(), 0.75 * state[name]["parameter"] + 0.25 * before)


def test_changes_are_sent_in_the_format_of_the_job() -> None:
    outer = OuterOptimizer(model_of(6), section_of(outer_dtype="bfloat16"))
    assert outer.change(0, outer.local(0)).dtype == torch.bfloat16


def test_restart_forgets_momentum_and_takes_the_parameters_as_they_are() -> None:
    model = model_of(7)
    outer = OuterOptimizer(model, section_of())
    change_parameters(model, 8)
    sync(outer, 0)
    change_parameters(model, 9)
    outer.restart()
    for name, parameter in model.named_parameters():
        assert torch.equal(outer.state()[name]["parameter"], parameter)
        assert not outer.state()[name]["momentum"].any()


def test_fragments_are_even_and_the_same_for_any_order_of_names() -> None:
    sizes = {"embedding": 100, **{f"block.{n}": 30 for n in range(6)}, "norm": 1}
    fragments = split(sizes, 3)
    assert fragments == split(dict(reversed(sizes.items())), 3)
    assert sorted(name for names in fragments for name in names) == sorted(sizes)
    totals = [sum(sizes[name] for name in names) for names in fragments]
    assert max(totals) - min(totals) <= 30
