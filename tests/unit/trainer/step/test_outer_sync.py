"""OuterSync: two replicas in threads train as DiLoCo by plain torch does; a sync that failed is done again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.spec.job.job import Job
from meshwright.trainer.optimizer.outer_optimizer import OuterOptimizer
from meshwright.trainer.step.outer_sync import OuterSync

NUM_STEPS = 8


class ThreadReplicas:
    """Sums over threads, in place of a ReplicaGroup."""

    def __init__(self, place: int, num_members: int, shared: dict[int, Tensor], barrier: threading.Barrier) -> None:
        self.num_members = num_members
        self._place, self._shared, self._barrier = place, shared, barrier
        self.num_failures = 0
        self.num_sums = 0

    def sum(self, tensor: Tensor) -> None:
        self.num_sums += 1
        self._shared[self._place] = tensor.clone()
        self._barrier.wait()
        total = torch.stack([self._shared[place] for place in range(self.num_members)]).sum(0)
        self._barrier.wait()
        if self.num_failures:
            # What gloo leaves of a failed sum may be anything.
            total.fill_(float("nan"))
        tensor.copy_(total)

    def commits(self) -> bool:
        has_failed = self.num_failures > 0
        self.num_failures -= has_failed
        return not has_failed


def job_of(**replicas: Any) -> Job:
    return Job.from_dict(
        {"train": {"steps": NUM_STEPS}, "replicas": {"independent": True, "sync_every": 4, **replicas}}
    )


def model_and_data(place: int) -> tuple[nn.Module, Callable[[int], Tensor]]:
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 6))
    # Not by the global generator, which the threads of a test share.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))

    def loss_of(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + place)
        inputs = torch.randn(4, 6, generator=generator)
        return (model(inputs) - inputs.roll(1, 0)).square().mean()

    return model, loss_of


def train(place: int, job: Job, replicas: Any, after_step: Callable[[int, nn.Module], None]) -> nn.Module:
    """Train a replica to the last step."""
    model, loss_of = model_and_data(place)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = OuterSync(job, OuterOptimizer(model, job.replicas), replicas)
    for step in range(1, NUM_STEPS + 1):
        loss_of(step).backward()
        adamw.step()
        adamw.zero_grad()
        while not sync(step):
            pass
        after_step(step, model)
    return model


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train_two(job: Job, fail: Callable[[ThreadReplicas], None] = lambda replicas: None) -> list[dict[int, Tensor]]:
    """Return the parameters of both replicas by step."""
    shared: dict[int, Tensor] = {}
    barrier, history = threading.Barrier(2, timeout=60), [{}, {}]  # type: ignore[var-annotated]

    def run(place: int) -> None:
        replicas = ThreadReplicas(place, 2, shared, barrier)
        fail(replicas)
        train(place, job, replicas, lambda step, model: history[place].update({step: flat(model)}))

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(run, place) for place in range(2)]:
            one.result()
    return history


def diloco(outer_rate: float, outer_momentum: float, every: int) -> Tensor:
    """Return the final parameters of two replicas by the paper's algorithm, in plain torch in one process."""
    replicas = [model_and_data(place) for place in range(2)]
    adamws = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model, _ in replicas]
    outer, _ = model_and_data(0)
    sgd = torch.optim.SGD(outer.parameters(), lr=outer_rate, momentum=outer_momentum, nesterov=outer_momentum > 0)
    for step in range(1, NUM_STEPS + 1):
        for (_, loss_of), adamw in zip(replicas, adamws, strict=True):
            loss_of(step).backward()
            adamw.step()
            adamw.zero_grad()
        if step % every == 0:
            models = [model for model, _ in replicas]
            for shared, *own in zip(*(each.parameters() for each in (outer, *models)), strict=True):
                shared.grad = shared.detach() - torch.stack([one.detach() for one in own]).mean(0)
            sgd.step()
            with torch.no_grad():
                for model in models:
                    for one, shared in zip(model.parameters(), outer.parameters(), strict=True):
                        one.copy_(shared)
    return flat(outer)


@pytest.mark.parametrize(("rate", "momentum", "every"), [(0.7, 0.9, 4), (1.0, 0.0, 2), (0.7, 0.9, 2)])
def test_two_replicas_train_as_the_paper_says(rate: float, momentum: float, every: int) -> None:
    job = job_of(sync_every=every, outer_learning_rate=rate, outer_momentum=momentum)
    first, second = train_two(job)
    torch.testing.assert_close(first[NUM_STEPS], diloco(rate, momentum, every), rtol=1e-6, atol=1e-6)
    for step in range(1, NUM_STEPS + 1):
        assert torch.equal(first[step], second[step]) == (step % every == 0)


def test_one_step_of_rate_1_without_momentum_averages_parameters() -> None:
    section = job_of(outer_learning_rate=1.0, outer_momentum=0.0)
    models = [model_and_data(place) for place in range(2)]
    for model, loss_of in models:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(1).backward()
        sgd.step()
    average = torch.stack([flat(model) for model, _ in models]).mean(0)
    start, _ = model_and_data(0)
    outer = OuterOptimizer(start, section.replicas)
    changes = [
        outer.change(0, [dict(model.named_parameters())[n].detach() for n in outer.fragments[0]]) for model, _ in models
    ]
    outer.update(0, outer.local(0), torch.stack(changes).mean(0), 0.0)
    torch.testing.assert_close(flat(start), average, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("kept_share", [0.0, 0.5])
def test_fragments_are_synced_in_turn_and_all_at_the_end(delay: int, kept_share: float) -> None:
    job = job_of(fragments=2, sync_delay_steps=delay, merge_factor=kept_share)
    first, second = train_two(job)
    outer = OuterOptimizer(model_and_data(0)[0], job.replicas)
    names = [name for name, _ in model_and_data(0)[0].named_parameters()]
    sizes = [parameter.numel() for parameter in model_and_data(0)[0].parameters()]
    for step in range(1, NUM_STEPS):
        one, other = (dict(zip(names, each[step].split(sizes), strict=True)) for each in (first, second))
        equal = {name for name in names if torch.equal(one[name], other[name])}
        due = set(outer.fragments[(step // 2 - 1) % 2]) if step % 2 == 0 and kept_share == 0 else set()
        assert equal == due, step
    assert torch.equal(first[NUM_STEPS], second[NUM_STEPS])


@pytest.mark.parametrize("delay", [0, 1])
def test_a_sync_that_failed_is_done_again_from_what_is_kept(delay: int) -> None:
    job = job_of(fragments=2, sync_delay_steps=delay)

    def fail(replicas: ThreadReplicas) -> None:
        replicas.num_failures = 3

    for failed, whole in zip(train_two(job, fail), train_two(job), strict=True):
        for step in range(1, NUM_STEPS + 1):
            assert torch.equal(failed[step], whole[step]), step


def test_a_replica_alone_with_rate_1_trains_as_without_outer_optimizer() -> None:
    job = job_of(outer_learning_rate=1.0, outer_momentum=0.0, fragments=2)
    barrier = threading.Barrier(1)
    alone = train(0, job, ThreadReplicas(0, 1, {}, barrier), lambda step, model: None)
    plain, loss_of = model_and_data(0)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(1, NUM_STEPS + 1):
        loss_of(step).backward()
        adamw.step()
        adamw.zero_grad()
    assert torch.equal(flat(alone), flat(plain))


def test_between_its_syncs_a_replica_sums_nothing() -> None:
    sums: list[int] = []
    replicas = ThreadReplicas(0, 1, {}, threading.Barrier(1))
    train(0, job_of(), replicas, lambda step, model: sums.append(replicas.num_sums))
    assert sums == [0, 0, 0, 1, 1, 1, 1, 2]


def test_a_stop_between_syncs_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    job = job_of()
    replicas: Any = ThreadReplicas(0, 1, {}, threading.Barrier(1))
    sync = OuterSync(job, OuterOptimizer(model_and_data(0)[0], job.replicas), replicas)
    with caplog.at_level("INFO", logger="meshwright"):
        for step in (5, 6, 7):
            sync.announce_stop("SIGTERM", step)
    assert [record.message for record in caplog.records] == [
        "SIGTERM: stopping at the next sum over replicas, after step 8"
    ]
