"""MicrobatchGraph: a microbatch's forward, loss and backward as one CUDA graph, captured once and replayed.

A replay is one launch, so the host's time for Python and kernel launches no longer bounds the step. What a graph reads
and writes keeps its address: inputs are copied into tensors of their own, the loss is read from one, and gradients
accumulate in buffers that are zeroed at the start of a step, where eager code frees them. Activations live in a memory
pool of the graph's own, which nothing else uses between two replays.

The first steps run as they are, on the stream that captures: they compile what layout.compile asks for, and let
libraries allocate their workspaces outside of the pool. Random numbers: torch advances the generator that a graph
was captured with at each replay, from the seed that it has then, so dropout draws what eager code draws.

Sources: torch's notes on CUDA graphs (docs.pytorch.org/docs/stable/notes/cuda.html), 2.11 to 2.13.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.errors import UnsupportedError
from meshwright.log import logger
from meshwright.models.contract import Loss, require_scalar
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stage_input import StageInput

NUM_WARM_UP = 2
"""Steps before the capture: the second may find other strides than the first, and compile again."""


def is_graphed(meshes: Meshes) -> bool:
    """Return whether microbatches are CUDA graphs: as layout.cuda_graphs says, but on a CPU, and while traced."""
    return meshes.layout.cuda_graphs and meshes.device_type == "cuda"


def shards_for_graphs(meshes: Meshes) -> bool:
    """Return whether parameters are sharded without FSDP2, whose hooks are work of the host."""
    return meshes.layout.cuda_graphs and meshes.device_type != "cpu"


class GradientBuffers:
    """Gradients at constant addresses: zeroed at the start of a step, where eager code frees them at its end.

    From the second step on; the first one shows which parameters get gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._used: list[nn.Parameter] = []
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def begin_step(self) -> None:
        """Set the gradients to zero."""
        if not self._buffers:
            self._buffers = [torch.zeros_like(each) for each in self._used]
        elif self._buffers:
            torch._foreach_zero_([_local(buffer) for buffer in self._buffers])
        for parameter, buffer in zip(self._used, self._buffers, strict=True):
            parameter.grad = buffer

    def end_step(self) -> None:
        """Note the parameters with a gradient, in the first step."""
        if not self._used:
            self._used = [each for each in self._parameters if each.grad is not None]


class MicrobatchGraph:
    """Callable: runs a microbatch, from the third step on by replaying its graph."""

    def __init__(self, stage: nn.Module, loss: Loss, device_type: str) -> None:
        self._stage, self._of_output, self._device = stage, loss, torch.device(device_type, torch.cuda.current_device())
        self._capturing = torch.cuda.Stream(self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_steps = 0
        self._inputs: dict[str, Tensor | None] = {}
        self._loss = torch.empty((), device=self._device)

    def begin_step(self) -> None:
        """Count the steps that warm up; before the first microbatch of a step."""
        self._num_steps += 1

    def __call__(self, microbatch: StageInput) -> Tensor:
        """Return the loss of a microbatch, and add its gradients."""
        tensors = {"inputs": microbatch.inputs, "targets": microbatch.targets, "scale": microbatch.loss_scale}
        given: dict[str, Tensor | None] = {**tensors, **microbatch.context}
        # Not during a capture, which holds the generator.
        microbatch.prepare()
        if self._num_steps <= NUM_WARM_UP:
            return self._warm_up(given)
        if self._graph is None:
            self._graph = self._captured(given)
            microbatch.prepare()
        for name, tensor in given.items():
            if (static := self._inputs[name]) is not None and tensor is not None:
                static.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._loss

    def _warm_up(self, given: dict[str, Tensor | None]) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        self._capturing.wait_stream(current)
        with torch.cuda.stream(self._capturing):
            loss = self._run(given)
        current.wait_stream(self._capturing)
        return loss

    def _captured(self, given: dict[str, Tensor | None]) -> torch.cuda.CUDAGraph:
        self._inputs = {name: None if tensor is None else tensor.clone() for name, tensor in given.items()}
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        try:
            # Other threads, which copy batches and watch for hangs, may call CUDA meanwhile.
            with torch.cuda.graph(graph, stream=self._capturing, capture_error_mode="thread_local"):
                self._loss = self._run(self._inputs)
        except RuntimeError as error:
            # The end of a capture that failed is an error of its own.
            first = error.__context__ or error
            raise UnsupportedError(
                "layout.cuda_graphs = true: forward or backward holds an operation that CUDA graphs cannot capture, "
                f"such as one that waits for the device ({str(first).splitlines()[0]}): remove it, or set "
                "layout.cuda_graphs to false"
            ) from error
        logger.info("captured forward and backward of a microbatch as a CUDA graph")
        return graph

    def _run(self, given: dict[str, Tensor | None]) -> Tensor:
        """Return the loss after forward and backward."""
        context = dict(given)
        inputs, targets, scale = (context.pop(name) for name in ("inputs", "targets", "scale"))
        assert targets is not None
        output = self._of_output(self._stage(inputs, **context), targets)
        require_scalar(output)
        output = output if scale is None else output * scale.to(output.dtype)
        torch.autograd.backward(output)
        return output.detach()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
