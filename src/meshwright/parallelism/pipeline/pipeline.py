"""Pipeline: runs one step's list of actions on this rank's stages. It is the only way that a step runs: without a
pipeline the list is forward, backward, forward, backward, ...

The lists come from spec/layout/schedule/schedule.py, with every send and receive in its place. Sends and receives are
posted in that
order and waited for when their tensor is needed, so communication hides behind whatever the list puts between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from meshwright.models.contract import Loss, require_scalar
from meshwright.parallelism.data.buffers import statistics_of, unchanged
from meshwright.parallelism.data.fully_sharded import (
    accumulate_gradients,
    await_gradients,
    gather_ahead,
    reduce_gradients,
    require_summed,
    set_gradient_sync,
)
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.split_backward import PendingWeights, backward_to_inputs, backward_to_weights
from meshwright.parallelism.pipeline.stage_reductions import reductions_of
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.spec.layout.schedule.action import ACTION_MARK, Action
from meshwright.spec.layout.schedule.schedule import Schedule, lower


@dataclass(frozen=True)
class StageInput:
    """One microbatch, as every stage of one data-parallel and context-parallel rank gets it."""

    inputs: Tensor
    targets: Tensor
    context: dict[str, Any] = field(default_factory=dict)
    """What the model's forward takes besides: positions and documents."""
    prepare: Callable[[], None] = lambda: None
    """Called before each forward: seeds the random numbers of this microbatch."""
    loss_scale: Tensor | None = None
    """A number that the loss is multiplied by; None for 1."""


class Observe(Protocol):
    """Hears where a step is: the phase that begins, and the rank that it has to wait for first."""

    def __call__(self, phase: str, waits_for_rank: int | None = None) -> None:
        """Take note; called many times in a step."""


def ignore(phase: str, waits_for_rank: int | None = None) -> None:
    """Take no note."""


@dataclass
class _Passed:
    """What a stage keeps of a microbatch between its forward and its backward."""

    received: Tensor | None
    output: Tensor | GradientEdge
    """Where backward starts: an edge of the graph, so that the output itself is freed once it is sent."""
    pending: PendingWeights | None = None


class _Sent(NamedTuple):
    """A send under way, and what it sends."""

    work: dist.Work
    tensor: Tensor
    peer: int


class Pipeline:
    """This rank's part of a pipeline's step."""

    def __init__(self, stages: Stages, schedule: Schedule, loss: Loss, meshes: Meshes, dtype: torch.dtype) -> None:
        self.stages, self.loss, self._meshes, self._dtype = stages, loss, meshes, dtype
        self.set_schedule(schedule)
        recomputes = meshes.layout.recomputes
        self._statistics = {n: statistics_of(stages[n]) if recomputes else [] for n in stages.numbers}
        self._passed: dict[tuple[int, int], _Passed] = {}
        self._arriving: dict[tuple[str, int, int], tuple[dist.Work | None, Tensor]] = {}
        self._outgoing: dict[tuple[str, int, int], Tensor] = {}
        self._sends: dict[tuple[str, int, int], _Sent] = {}
        self._splits_backward = meshes.layout.may_split_backward
        self._total = torch.zeros(())
        self.observe: Observe = ignore
        """Called where the step is: with each action before it runs, and with the rank that it is about to wait for."""

    def set_schedule(self, schedule: Schedule) -> None:
        """Run `schedule`, of the same stages, from the next step on."""
        self.schedule = schedule
        self._actions = lower(schedule)[self._meshes.rank("pp")]
        self._reductions = reductions_of(self._actions, self._meshes.layout.reduces_each_microbatch)

    def step(self, microbatches: Sequence[StageInput]) -> Tensor:
        """Return the sum of the losses (0 on ranks without the last stage); gradients are summed into the parameters.

        A collective. After it the gradients of each stage are complete over the ranks that shard it.
        """
        self._start(microbatches)
        layout = self._meshes.layout
        reductions, is_each = self._reductions, layout.reduces_each_microbatch
        for number in self.stages.numbers:
            waits = is_each and number not in reductions.awaited
            set_gradient_sync(self.stages[number], layout, reduces=is_each, is_last=False, waits=waits)
            gather_ahead(self.stages[number], layout)
        for index, action in enumerate(self._actions):
            stage = self.stages[action.stage]
            if index in reductions.last_inside:
                # The reduction of each block then hides behind the backward of the one before it.
                waits = action.stage not in reductions.awaited
                set_gradient_sync(stage, layout, reduces=True, is_last=True, waits=waits)
            self.observe(f"{ACTION_MARK}{action}")
            with record_function(f"{ACTION_MARK}{action}"):
                self._run(action, microbatches[action.microbatch])
            if index in reductions.after:
                reduce_gradients(stage, layout, is_last=reductions.after[index])
            elif action.kind == "W":
                accumulate_gradients(stage)
        self._finish()
        for number in sorted(reductions.awaited):
            await_gradients(self.stages[number])
        for stage in self.stages if is_each else ():
            require_summed(stage)
        return self._total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[StageInput]) -> Tensor:
        """Return the sum of the losses (0 on ranks without the last stage), forward only; a collective."""
        self._start(microbatches)
        numbers = range(len(microbatches))
        # As many microbatches at a time as keep all ranks busy.
        for first in numbers[:: self._meshes.degree("pp")]:
            for stage in self.stages.numbers:
                self._evaluate_stage(stage, microbatches, numbers[first : first + self._meshes.degree("pp")])
        self._finish()
        return self._total

    def _evaluate_stage(self, stage: int, microbatches: Sequence[StageInput], numbers: Sequence[int]) -> None:
        """Run the forwards of some microbatches on one stage.

        All receives stand before the first send: stages before this one wait for nothing that comes after it, and two
        ranks that send to each other do so in one order.
        """
        for number in numbers if stage > 0 and self._is_elsewhere(stage - 1) else ():
            self._receive(Action("RECV_F", stage, number), microbatches[number])
        for number in numbers:
            self._forward(Action("F", stage, number), microbatches[number])
            self._passed.clear()
            if not self.stages.is_last(stage) and self._is_elsewhere(stage + 1):
                self._send(Action("SEND_F", stage, number))

    def _start(self, microbatches: Sequence[StageInput]) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=microbatches[0].inputs.device)

    def _finish(self) -> None:
        for key in list(self._sends):
            self._await_send(*key)
        assert not self._passed, f"forwards without a backward: {sorted(self._passed)}"
        assert not self._arriving, f"received and never used: {sorted(self._arriving)}"

    def _run(self, action: Action, microbatch: StageInput) -> None:
        match action.kind:
            case "F":
                self._forward(action, microbatch)
            case "B" | "I" | "W":
                with unchanged(self._statistics[action.stage]):
                    self._backward_to_weights(action) if action.kind == "W" else self._backward(action)
            case "SEND_F" | "SEND_B":
                self._send(action)
            case "RECV_F" | "RECV_B":
                self._receive(action, microbatch)
            case other:
                raise AssertionError(f"a schedule has no action {other}")

    def _forward(self, action: Action, microbatch: StageInput) -> None:
        stage, number = action.stage, action.microbatch
        received = None if stage == 0 else self._take("F", stage, number)
        if received is not None:
            received.requires_grad_(torch.is_grad_enabled())
        microbatch.prepare()
        output = self.stages[stage](microbatch.inputs if received is None else received, **microbatch.context)
        if self.stages.is_last(stage):
            output = self.loss(output, microbatch.targets)
            require_scalar(output)
            if microbatch.loss_scale is not None:
                output = output * microbatch.loss_scale.to(output.dtype)
            self._total += output.detach()
        else:
            self._hand_over("F", stage, stage + 1, number, output.detach())
            if output.requires_grad and not self._splits_backward:
                # torch's split of the graph starts from tensors.
                output = get_gradient_edge(output)
        self._passed[stage, number] = _Passed(received, output)

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        passed = self._passed[stage, number]
        gradient = None if self.stages.is_last(stage) else self._take("B", stage, number)
        self._await_send("F", stage, number)
        if action.kind == "B":
            torch.autograd.backward(passed.output, gradient)
            del self._passed[stage, number]
        else:
            assert isinstance(passed.output, Tensor)
            passed.pending = backward_to_inputs(passed.output, gradient, passed.received, self.stages[stage])
        if passed.received is not None:
            gradient, passed.received.grad = passed.received.grad, None
            assert gradient is not None
            self._hand_over("B", stage, stage - 1, number, gradient)

    def _backward_to_weights(self, action: Action) -> None:
        passed = self._passed.pop((action.stage, action.microbatch))
        assert passed.pending is not None, f"{action} before the backward to the inputs"
        backward_to_weights(passed.pending, self.stages[action.stage])

    def _is_elsewhere(self, stage: int) -> bool:
        return self.stages.rank_of_stage[stage] != self._meshes.rank("pp")

    def _global_rank(self, peer: int) -> int:
        return dist.get_global_rank(self._meshes.group("pp"), peer)

    def _hand_over(self, kind: str, stage: int, target: int, number: int, tensor: Tensor) -> None:
        """Keep `tensor` for the send that follows, or for the target itself where it is on this rank."""
        if self._is_elsewhere(target):
            self._outgoing[kind, stage, number] = tensor
        else:
            self._arriving[kind, target, number] = (None, tensor)

    def _take(self, kind: str, stage: int, number: int) -> Tensor:
        work, tensor = self._arriving.pop((kind, stage, number))
        if work is not None:
            action = f"{ACTION_MARK}{stage}{kind}{number}"
            self.observe(action, self._global_rank(self.stages.rank_of_stage[stage + (-1 if kind == "F" else 1)]))
            work.wait()
            self.observe(action)
        return tensor

    def _send(self, action: Action) -> None:
        kind = action.kind.removeprefix("SEND_")
        tensor = self._outgoing.pop((kind, action.stage, action.microbatch)).contiguous()
        peer = self.stages.rank_of_stage[action.stage + (1 if kind == "F" else -1)]
        # A split backward keeps the output until its gradient is back. Else its receiver soon has what was sent before.
        key = (kind, action.stage, action.microbatch if kind == "F" and self._splits_backward else -1)
        self._await_send(*key)
        self.observe(f"{ACTION_MARK}{action}")
        # The peer is a rank of the group: a plain dst would be a rank of the whole job.
        work = dist.isend(tensor, group=self._meshes.group("pp"), group_dst=peer)
        assert work is not None
        self._sends[key] = _Sent(work, tensor, peer)

    def _await_send(self, kind: str, stage: int, number: int) -> None:
        if (sent := self._sends.pop((kind, stage, number), None)) is not None:
            self.observe("sends", self._global_rank(sent.peer))
            sent.work.wait()

    def _receive(self, action: Action, microbatch: StageInput) -> None:
        kind = action.kind.removeprefix("RECV_")
        stage: Any = self.stages[action.stage]
        shape = [*microbatch.inputs.shape, stage.stage_width]
        # Between blocks the tensor-parallel ranks split the sequence.
        shape[1] //= self._meshes.degree("tp")
        buffer = torch.empty(shape, dtype=self._dtype, device=microbatch.inputs.device)
        peer = self.stages.rank_of_stage[action.stage + (-1 if kind == "F" else 1)]
        work = dist.irecv(buffer, group=self._meshes.group("pp"), group_src=peer)
        self._arriving[kind, action.stage, action.microbatch] = (work, buffer)
