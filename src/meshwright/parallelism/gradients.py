"""Final reduction, norm and clipping of gradients, once per step.

    1. parameters replicated over tp   summed over tp: a rank has the gradient of its shard of sequence, heads, experts
    2. all, of a model of one graph    summed over dp_replicate, if several microbatches left that to this place
    3. tied embedding                  summed over the first and the last stage
    4. all                             divided by num_microbatches x dp x cp, the number of mean losses in the sum

The norm counts each element once, whatever its replicas, with one all-reduce for all meshes. torch's clip_grad_norm_
rejects parameters on different meshes and reduces over each axis in turn.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.parallelism.collectives import profiler_range
from meshwright.parallelism.exact_sums import norm_of
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages, shared_parts


class Gradients:
    """The gradients of this rank's stages."""

    def __init__(self, model: Stages, meshes: Meshes, *, leaves_scale: bool = False) -> None:
        """With `leaves_scale` division and clipping are left to the optimizer, as one factor: `scale`."""
        self._model, self._meshes = model, meshes
        self._leaves_scale = leaves_scale
        self._is_exact = model.loss_format is not None
        self.scale: Tensor | None = None
        """What the gradients are still to be multiplied by; None for 1."""
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.summed_over_tp = [parameter for parameter in self._parameters if _is_replicated_over_tp(parameter)]
        self._tied = tied_parameters(model)
        copies_of_tied = set(self._tied.get(model.num_stages - 1, ()))
        num_ranks = meshes.layout.num_ranks // meshes.layout.pp
        self._weights = {
            parameter: 0.0 if parameter in copies_of_tied else _num_shards(parameter) / num_ranks
            for parameter in self._parameters
        }
        self._num_copies = num_ranks
        self._finished: list[Tensor] = []
        """Weighted squares of the gradients of this step that were used before the others were final."""

    @torch.no_grad()
    def finish(self, num_microbatches: int) -> None:
        """Turn sums over microbatches into gradients of the mean loss, in place; a collective."""
        _sum_over(self._meshes.group("tp"), _local_gradients(self.summed_over_tp), is_exact=self._is_exact)
        if self._model.sums_replicas_after:
            _sum_over(self._meshes.group("dp_replicate"), _local_gradients(self._parameters))
        self._sum_tied()
        scale = self._scale(num_microbatches)
        if self._leaves_scale:
            self.scale = torch.full((), scale, dtype=torch.float64, device=self._meshes.device_type)
        elif scale != 1 and (gradients := _local_gradients(self._parameters)):
            torch._foreach_mul_(gradients, scale)

    @torch.no_grad()
    def apply_scale(self) -> None:
        """Multiply the gradients by `scale` now, for what reads them before the update."""
        if self.scale is not None and (gradients := _local_gradients(self._parameters)):
            torch._foreach_mul_(gradients, self.scale.to(gradients[0]))
            self.scale = None

    def final_in_backward(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are those of the mean loss once they are reduced and scaled."""
        later = {*self.summed_over_tp, *(parameter for copies in self._tied.values() for parameter in copies)}
        return [parameter for parameter in self._parameters if parameter not in later]

    def finish_one(self, parameter: nn.Parameter) -> None:
        """Scale the reduced gradient of `parameter`, of the only microbatch of a step, and count it in the norm."""
        if self._model.replica_sums is not None:
            self._model.replica_sums.sum_now(parameter)
        assert parameter.grad is not None
        gradient = _local(parameter.grad)
        if (scale := self._scale(1)) != 1:
            gradient.mul_(scale)
        norm = torch.linalg.vector_norm(gradient)
        self._finished.append(norm.double().square() * self._weights[parameter])

    def _scale(self, num_microbatches: int) -> float:
        return 1 / (num_microbatches * self._meshes.layout.dp * self._meshes.layout.cp)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Return the global 2-norm before clipping; scale the gradients in place if it exceeds `max_norm`.

        `max_norm` = 0 disables clipping. A collective.
        """
        norm = self.norm()
        norm = norm if self.scale is None else norm * self.scale
        if max_norm <= 0:
            return norm
        share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if self.scale is not None:
            self.scale = self.scale * share
        elif gradients := _local_gradients(self._parameters):
            # Offloaded gradients are on the CPU, the norm is on the device.
            torch._foreach_mul_(gradients, share.to(gradients[0]))
        return norm

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients of the model, in float64; a collective."""
        device = torch.device(self._meshes.device_type)
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self._is_exact:
            return total.fill_(norm_of(self._counted(), self._num_copies, device))
        weighted = [
            (_local(parameter.grad), weight)
            for parameter, weight in self._weights.items()
            if parameter.grad is not None
        ]
        if weighted:
            norms = torch.stack(torch._foreach_norm([gradient for gradient, _ in weighted])).to(device, torch.float64)
            weights = torch.tensor([weight for _, weight in weighted], dtype=torch.float64, device=device)
            total = (norms.square() * weights).sum()
        if self._finished:
            total = total + torch.stack(self._finished).sum()
            self._finished.clear()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def _counted(self) -> list[tuple[Tensor, int]]:
        """Return each gradient with its weight in `_num_copies`."""
        return [
            (_local(parameter.grad), round(weight * self._num_copies))
            for parameter, weight in self._weights.items()
            if parameter.grad is not None
        ]

    def _sum_tied(self) -> None:
        first, last = self._tied.get(0, []), self._tied.get(self._model.num_stages - 1, [])
        if first and last:
            for one, other in zip(_local_gradients(first), _local_gradients(last), strict=True):
                one.add_(other)
                other.copy_(one)
        elif self._model.num_stages > 1:
            for gradient in _local_gradients(first or last):
                # Both ranks add the same two numbers, so their copies stay bitwise equal.
                gradient.add_(_exchange(gradient, self._meshes, self._model))


def tied_parameters(model: Stages) -> dict[int, list[nn.Parameter]]:
    """Return this rank's parameters that the first and the last stage share, by stage."""
    ends = {0, model.num_stages - 1} if model.num_stages > 1 else set()
    return {
        number: parameters
        for number in model.numbers
        if number in ends and (parameters := _parameters_of(model[number], shared_parts(model[number])))
    }


def share_tied(model: Stages, meshes: Meshes) -> None:
    """Copy tied parameters from the first stage to the last, after initialization or loading; a collective."""
    tied = tied_parameters(model)
    first, last = tied.get(0, []), tied.get(model.num_stages - 1, [])
    with torch.no_grad():
        if first and last:
            for source, target in zip(first, last, strict=True):
                _local(target).copy_(_local(source))
            return
        for parameter in first:
            _send(_local(parameter), model.rank_of_stage[-1], meshes)
        for parameter in last:
            _local(parameter).copy_(_received(_local(parameter), model.rank_of_stage[0], meshes))


def _exchange(tensor: Tensor, meshes: Meshes, model: Stages) -> Tensor:
    """Return the same tensor of the rank at the other end of the pipeline.

    One sends first: NCCL executes the P2P ops of two ranks in order, so two simultaneous sends may deadlock.
    """
    first_rank, last_rank = model.rank_of_stage[0], model.rank_of_stage[-1]
    if meshes.rank("pp") == first_rank:
        _send(tensor, last_rank, meshes)
        return _received(tensor, last_rank, meshes)
    received = _received(tensor, first_rank, meshes)
    _send(tensor, first_rank, meshes)
    return received


def _send(tensor: Tensor, peer: int, meshes: Meshes) -> None:
    dist.send(tensor.contiguous(), group=meshes.group("pp"), group_dst=peer)


def _received(like: Tensor, peer: int, meshes: Meshes) -> Tensor:
    received = torch.empty_like(like)
    dist.recv(received, group=meshes.group("pp"), group_src=peer)
    return received


def _parameters_of(model: nn.Module, parts: Sequence[str]) -> list[nn.Parameter]:
    modules = [getattr(model, part) for part in parts]
    return [parameter for module in modules if module is not None for parameter in module.parameters()]


def _sum_over(group: dist.ProcessGroup, gradients: Sequence[Tensor], *, is_exact: bool = False) -> None:
    """Sum each gradient over `group`, with one all-reduce per dtype; in float64 where that `is_exact`."""
    if group.size() == 1:
        return
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in same])
        flat = flat.double() if is_exact else flat
        with profiler_range(group):
            dist.all_reduce(flat, group=group)
        for gradient, total in zip(same, flat.split([gradient.numel() for gradient in same]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _is_replicated_over_tp(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    # The ranks of etp, which shards experts, are those of tp.
    return any(axis in axes and parameter.placements[axes.index(axis)].is_replicate() for axis in ("tp", "etp"))


def _num_shards(parameter: nn.Parameter) -> int:
    """Return the number of shards of a parameter."""
    num_shards = 1
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            num_shards *= 1 if placement.is_replicate() else parameter.device_mesh.size(dim)
    return num_shards


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    # Call under no_grad: otherwise each to_local makes an autograd node (2.13).
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
