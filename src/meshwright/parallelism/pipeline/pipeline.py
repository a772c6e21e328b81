"""Pipeline execution: one step's list of actions on this rank's stages.

Every step runs this way; without a pipeline the list is forward, backward, forward, backward, ... The lists come from
spec/layout/schedule/schedule.py, with every send and receive in its place. Sends and receives are posted in that order
and waited for when their tensor is needed, so that they overlap with the actions in between.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from meshwright.models.contract import require_scalar
from meshwright.parallelism.data.fully_sharded import (
    accumulate_gradients,
    await_gradients,
    gradients_kept,
    prefetch_first_parameters,
    reduce_gradients,
    require_reduced,
    set_gradient_sync,
)
from meshwright.parallelism.data.materialize import statistics_of, unchanged
from meshwright.parallelism.data.missing_gradients import complete_gradients
from meshwright.parallelism.graph.cuda_graph import GradientBuffers, MicrobatchGraph, is_graphed, shards_for_graphs
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stage_input import StageInput, StageLoss
from meshwright.parallelism.pipeline.stages import Stages, reductions_of
from meshwright.parallelism.torch_private.torch_split_backward import (
    PendingWeights,
    backward_to_all,
    backward_to_inputs,
    backward_to_weights,
)
from meshwright.spec.layout.schedule.action import ACTION_MARK, Action
from meshwright.spec.layout.schedule.schedule import Schedule, lower


class Observe(Protocol):
    """Callback at the start of each phase of a step, with the rank whose message it waits for."""

    def __call__(self, phase: str, waits_for_rank: int | None = None) -> None:
        """Record the phase; called many times in a step."""


def ignore(phase: str, waits_for_rank: int | None = None) -> None:
    """Do nothing."""


@dataclass
class _InFlight:
    """State of a microbatch on a stage between its forward and its backward."""

    received: Tensor | None
    output: Tensor | GradientEdge
    """Start of backward: a graph edge, so that the output is freed once it is sent."""
    pending: PendingWeights | None = None


class _Sent(NamedTuple):
    """A pending send and its tensor."""

    work: dist.Work
    tensor: Tensor
    peer: int


class Pipeline:
    """This rank's part of a pipeline's step."""

    def __init__(self, stages: Stages, schedule: Schedule, loss: StageLoss, meshes: Meshes, dtype: torch.dtype) -> None:
        self.stages, self.loss, self._meshes, self._dtype = stages, loss, meshes, dtype
        self.set_schedule(schedule)
        recomputes = meshes.layout.recomputes
        self._statistics = {n: statistics_of(stages[n]) if recomputes else [] for n in stages.numbers}
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._arriving: dict[tuple[str, int, int], tuple[dist.Work | None, Tensor]] = {}
        self._outgoing: dict[tuple[str, int, int], Tensor] = {}
        self._sends: dict[tuple[str, int, int], _Sent] = {}
        self._splits_backward = meshes.layout.may_split_backward
        self._total = torch.zeros(())
        self._graph = MicrobatchGraph(stages[0], loss, meshes.device_type) if is_graphed(meshes) else None
        parameters = [each for each in stages.parameters() if each.requires_grad]
        self._gradients = GradientBuffers(parameters) if shards_for_graphs(meshes) else None
        self.observe: Observe = ignore
        """Called before each action, and before each wait with the rank that is waited for."""

    def set_schedule(self, schedule: Schedule) -> None:
        """Use `schedule`, of the same stages, from the next step on."""
        self.schedule = schedule
        self._actions = lower(schedule)[self._meshes.rank("pp")]
        self._reductions = reductions_of(self._actions, self._meshes.layout.reduces_each_microbatch)

    def step(self, microbatches: Sequence[StageInput]) -> Tensor:
        """Return the sum of the losses (0 on ranks without the last stage) and accumulate gradients; a collective.

        Gradients are then reduced over the ranks that shard each stage.
        """
        self._start(microbatches)
        if self._gradients is not None:
            self._gradients.begin_step()
        if self._graph is not None:
            self._replay(microbatches, self._graph)
        else:
            self._run_actions(microbatches)
        if self._gradients is not None:
            self._gradients.end_step()
        return self._total

    def _run_actions(self, microbatches: Sequence[StageInput]) -> None:
        """Run the schedule's actions, and reduce gradients."""
        layout = self._meshes.layout
        reductions, is_each = self._reductions, layout.reduces_each_microbatch
        for number in self.stages.numbers:
            waits = is_each and number not in reductions.awaited
            set_gradient_sync(self.stages[number], layout, reduces=is_each, is_last=False, waits=waits)
            prefetch_first_parameters(self.stages[number], layout)
        for index, action in enumerate(self._actions):
            stage = self.stages[action.stage]
            if index in reductions.last_inside:
                # The reduction of each block overlaps with the backward of the previous one.
                waits = action.stage not in reductions.awaited
                set_gradient_sync(stage, layout, reduces=True, is_last=True, waits=waits)
                self.stages.begin_replica_sums()
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
        complete_gradients(self.stages, self._meshes)
        for stage in self.stages if is_each else ():
            require_reduced(stage)

    def _replay(self, microbatches: Sequence[StageInput], graph: MicrobatchGraph) -> None:
        graph.begin_step()
        for number, microbatch in enumerate(microbatches):
            name = f"{ACTION_MARK}{Action('B', 0, number)}"
            self.observe(name)
            with record_function(name):
                self._total += graph(microbatch)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[StageInput], loss: StageLoss | None = None) -> Tensor:
        """Return the sum of the losses, or of another `loss`, 0 without the last stage; forward only; a collective."""
        self._start(microbatches)
        numbers, pp = range(len(microbatches)), self._meshes.degree("pp")
        # pp microbatches at a time keep all ranks busy.
        for first in numbers[::pp]:
            for stage in self.stages.numbers:
                self._evaluate_stage(stage, microbatches, numbers[first : first + pp], loss or self.loss)
        self._finish()
        return self._total

    def forget_microbatches(self) -> None:
        """Drop the microbatches of a step that failed, with all that they saved for backward."""
        for held in (self._in_flight, self._arriving, self._outgoing, self._sends):
            held.clear()

    def _evaluate_stage(self, stage: int, microbatches: Sequence[StageInput], numbers: range, loss: StageLoss) -> None:
        """Run the forwards of some microbatches on one stage.

        All receives are posted before the first send, so that no two ranks wait for each other's sends.
        """
        for number in numbers if stage > 0 and self._is_elsewhere(stage - 1) else ():
            self._receive(Action("RECV_F", stage, number), microbatches[number])
        for number in numbers:
            self._forward(Action("F", stage, number), microbatches[number], loss)
            self._in_flight.clear()
            if not self.stages.is_last(stage) and self._is_elsewhere(stage + 1):
                self._send(Action("SEND_F", stage, number))

    def _start(self, microbatches: Sequence[StageInput]) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=microbatches[0].inputs.device)

    def _finish(self) -> None:
        for key in list(self._sends):
            self._await_send(*key)
        assert not self._in_flight, f"forwards without a backward: {sorted(self._in_flight)}"
        assert not self._arriving, f"received and never used: {sorted(self._arriving)}"

    def _run(self, action: Action, microbatch: StageInput) -> None:
        match action.kind:
            case "F":
                self._forward(action, microbatch, self.loss)
            case "B" | "I" | "W":
                with unchanged(self._statistics[action.stage]):
                    self._backward_to_weights(action) if action.kind == "W" else self._backward(action)
            case "SEND_F" | "SEND_B":
                self._send(action)
            case "RECV_F" | "RECV_B":
                self._receive(action, microbatch)
            case other:
                raise AssertionError(f"a schedule has no action {other}")

    def _forward(self, action: Action, microbatch: StageInput, loss: StageLoss) -> None:
        stage, number = action.stage, action.microbatch
        received = None if stage == 0 else self._take("F", stage, number)
        if received is not None:
            received.requires_grad_(torch.is_grad_enabled())
        microbatch.prepare()
        output = self.stages[stage](microbatch.inputs if received is None else received, **microbatch.context)
        if self.stages.is_last(stage):
            output = loss(output, microbatch.targets, *microbatch.loss_arguments)
            require_scalar(output)
            if microbatch.loss_scale is not None:
                output = output * microbatch.loss_scale.to(output.dtype)
            self._total += self.stages.summand(output.detach())
        else:
            self._hand_over("F", stage, stage + 1, number, output.detach())
            if output.requires_grad and not self._splits_backward:
                # torch splits the graph from tensors, not from edges.
                output = get_gradient_edge(output)
        self._in_flight[stage, number] = _InFlight(received, output)

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        state = self._in_flight[stage, number]
        gradient = None if self.stages.is_last(stage) else self._take("B", stage, number)
        self._await_send("F", stage, number)
        if action.kind == "B":
            backward_to_all(state.output, gradient)
            del self._in_flight[stage, number]
        else:
            assert isinstance(state.output, Tensor)
            state.pending = backward_to_inputs(state.output, gradient, state.received, self.stages[stage])
        if state.received is not None:
            gradient, state.received.grad = state.received.grad, None
            assert gradient is not None
            self._hand_over("B", stage, stage - 1, number, gradient)

    def _backward_to_weights(self, action: Action) -> None:
        state = self._in_flight.pop((action.stage, action.microbatch))
        assert state.pending is not None, f"{action} before the backward to the inputs"
        stage = self.stages[action.stage]
        # The first stage runs its whole backward here, whose hooks reduce.
        with nullcontext() if state.received is None else gradients_kept(stage):
            backward_to_weights(state.pending, stage)

    def _is_elsewhere(self, stage: int) -> bool:
        return self.stages.rank_of_stage[stage] != self._meshes.rank("pp")

    def _global_rank(self, peer: int) -> int:
        return dist.get_global_rank(self._meshes.group("pp"), peer)

    def _hand_over(self, kind: str, stage: int, target: int, number: int, tensor: Tensor) -> None:
        """Keep `tensor` for the next send, or for the target stage if it is on this rank."""
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
        # A split backward keeps the output until its gradient arrives. Otherwise wait for the previous send.
        key = (kind, action.stage, action.microbatch if kind == "F" and self._splits_backward else -1)
        self._await_send(*key)
        self.observe(f"{ACTION_MARK}{action}")
        # group_dst, since dst would be a global rank.
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
        # Between blocks the sequence is sharded over tp.
        shape[1] //= self._meshes.degree("tp")
        buffer = torch.empty(shape, dtype=self._dtype, device=microbatch.inputs.device)
        peer = self.stages.rank_of_stage[action.stage + (-1 if kind == "F" else 1)]
        work = dist.irecv(buffer, group=self._meshes.group("pp"), group_src=peer)
        self._arriving[kind, action.stage, action.microbatch] = (work, buffer)
