"""Losses that one rank differentiates; the mean over the ranks that share samples is the loss of the step.

Shapes: B batch, S positions, T = B x S, V this rank's shard of the vocabulary.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.models.contract import Loss, loss_of, next_token_loss
from meshwright.models.rope import at_least_float32
from meshwright.parallelism.collectives import all_gather_dim, all_reduce_max, all_reduce_sum
from meshwright.parallelism.compile_blocks import prepare_compile
from meshwright.parallelism.head import SeparateHead, separate_head
from meshwright.parallelism.losses.chunked_loss import Chunking, chunked_loss, chunked_losses, cross_entropy_
from meshwright.parallelism.losses.compiled_loss import fused_cross_entropy_, fused_losses
from meshwright.parallelism.losses.token_accuracy import TokenAccuracy
from meshwright.parallelism.mesh import Meshes
from meshwright.spec.layout.layout import Layout

_Losses: TypeAlias = Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]


def make_loss(
    model: nn.Module, meshes: Meshes, last_stage: nn.Module | None = None, accuracy: TokenAccuracy | None = None
) -> Loss:
    """Return loss(output, targets) of this rank: equal on all tp ranks; the mean over cp ranks is the loss.

    The next-token loss also counts into `accuracy`. A model's own loss gets all-gathered logits, of this rank's shard
    of the sequence. With layout.loss_chunks the loss takes over the head of `last_stage`, the stage that computes it,
    None if another rank has that. Raises UnsupportedError for layout.compile_loss with a loss of the model's own.
    """
    loss, layout = loss_of(model), meshes.layout
    if layout.compile_loss and loss is not next_token_loss:
        raise UnsupportedError(
            f"layout.compile_loss = true compiles the next-token loss, but {type(model).__name__} has a loss of its "
            "own: set layout.compile_loss to false, and call torch.compile in that method where it pays"
        )
    compile_ = _compiler(layout) if layout.compile_loss else None
    if layout.loss_chunks > 1 and last_stage is not None:
        head = separate_head(last_stage, layout.loss_chunks)
        of_chunk = cross_entropy_ if compile_ is None else compile_(fused_cross_entropy_)
        of_chunk = of_chunk if accuracy is None else accuracy.counting(of_chunk)
        chunking = Chunking(layout.loss_chunks, meshes.group("tp"), layout.may_split_backward, of_chunk)
        if isinstance(last_stage, FSDPModule):
            # The head is part of the root unit.
            chunking = chunking._replace(unshard=last_stage.unshard)
        return ChunkedNextTokenLoss(head, chunking, accuracy)
    if loss is next_token_loss:
        return NextTokenLoss(meshes.group("tp"), None if compile_ is None else compile_(fused_losses), accuracy)
    return loss if layout.tp == 1 else _LossOfGatheredLogits(loss, meshes.group("tp"))


def _compiler(layout: Layout) -> Callable[[Any], Any]:
    prepare_compile(layout)
    # All microbatches have one shape. The last of several chunks may be shorter: a graph of its own.
    return partial(torch.compile, backend=layout.compile_backend, fullgraph=True, dynamic=False)


class NextTokenLoss:
    """Callable: the sum of next-token losses divided by the number of targets; tp_group shards the vocabulary.

    Targets of -100 add 0 to the sum but count in the number. Divided by `counted_share`, the result is the mean over
    the step's counted targets. A mean over each microbatch's counted targets would weigh a target by the number of
    others in its microbatch, which depends on the layout.
    """

    def __init__(
        self, tp_group: dist.ProcessGroup, compiled: _Losses | None = None, accuracy: TokenAccuracy | None = None
    ) -> None:
        """Compute the losses by `compiled`, where it is given, and count right targets where `accuracy` is."""
        self._tp_group, self._compiled, self._accuracy = tp_group, compiled, accuracy

    def begin(self) -> None:
        """Forget what `metrics` are of, before a step or a validation."""
        if self._accuracy is not None:
            self._accuracy.begin()

    def metrics(self, sum_outside: Callable[[Tensor], object] | None = None) -> dict[str, float]:
        """Return what was counted since `begin`, over all ranks and those that `sum_outside` adds; a collective.

        Of targets: `token_accuracy`; empty where they are not counted.
        """
        return {} if self._accuracy is None else {"token_accuracy": self._accuracy.share(sum_outside)}

    def __call__(self, output_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the loss of this rank's shard of the sequence."""
        if self._tp_group.size() == 1 and not self._is_compiled(output_BSV, targets_BS):
            total = next_token_loss(output_BSV, targets_BS, reduction="sum")
        else:
            total = self.of_tokens(output_BSV, targets_BS).sum()
        if self._accuracy is not None:
            self._accuracy.count(output_BSV.flatten(0, -2), targets_BS.flatten())
        return total / targets_BS.numel()

    def of_tokens(self, output_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return losses_T of this rank's shard of the sequence in nats; 0 for targets of -100."""
        if self._compiled is not None and self._is_compiled(output_BSV, targets_BS):
            return self._compiled(output_BSV.flatten(0, -2), targets_BS.flatten(), self._tp_group)
        if self._tp_group.size() == 1:
            return next_token_loss(output_BSV, targets_BS, reduction="none")
        return vocab_parallel_losses(output_BSV, targets_BS, self._tp_group)

    def _is_compiled(self, output_BSV: Tensor, targets_BS: Tensor) -> bool:
        return self._compiled is not None and output_BSV.shape[:-1] == targets_BS.shape


class ChunkedNextTokenLoss(NextTokenLoss):
    """The same loss of logits that it computes itself, in chunks of tokens, from the input of the head."""

    def __init__(self, head: SeparateHead, chunking: Chunking, accuracy: TokenAccuracy | None = None) -> None:
        """`accuracy` counts in the cross_entropy of `chunking`."""
        super().__init__(chunking.tp_group, accuracy=accuracy)
        self._head, self._chunking = head, chunking

    def __call__(self, output: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the loss of this rank's shard of the sequence; `output` is that of a stage with a separated head."""
        return chunked_loss(self._hidden(output, targets_BS), self._head, targets_BS.flatten(), self._chunking)

    def of_tokens(self, output: Tensor, targets_BS: Tensor) -> Tensor:
        """Return losses_T of this rank's shard of the sequence."""
        return chunked_losses(self._hidden(output, targets_BS), self._head, targets_BS.flatten(), self._chunking)

    def _hidden(self, output: Tensor, targets_BS: Tensor) -> Tensor:
        hidden_BSD = self._head.hidden_of(output)
        if self._tp_group.size() > 1:
            _require_whole_sequence(hidden_BSD, targets_BS, self._tp_group.size())
        return hidden_BSD.flatten(0, -2)


class RowLosses:
    """Callable: a loss that keeps the sum of each row, for one evaluation."""

    def __init__(self, loss: NextTokenLoss) -> None:
        self._loss = loss
        self.of_microbatches: list[Tensor] = []
        """losses_B (float64) of each microbatch: over this rank's shard of the sequence, 0 for targets of -100."""

    def __call__(self, output: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the sum of all rows."""
        losses_B = self._loss.of_tokens(output, targets_BS).double().view(targets_BS.shape).sum(1)
        self.of_microbatches.append(losses_B)
        return losses_B.sum()


def counted_share(
    targets: Iterable[Tensor], device: torch.device, sum_outside: Callable[[Tensor], object] | None = None
) -> Tensor:
    """Return the fraction of a step's targets, over all ranks, that are not -100: a float64 scalar; a collective.

    `sum_outside` adds in place what ranks outside of this process group have counted.

    `targets` are those of this rank's microbatches, of whole sequences. Ranks that share samples count the same ones.
    """
    counts = [((one != -100).sum().item(), one.numel()) for one in targets]
    totals = torch.tensor(counts, dtype=torch.float64).sum(0).to(device)
    dist.all_reduce(totals)
    if sum_outside is not None:
        sum_outside(totals)
    return totals[0] / totals[1]


class _LossOfGatheredLogits:
    """Callable: a model's own loss, on logits all-gathered along the vocabulary."""

    def __init__(self, loss: Loss, tp_group: dist.ProcessGroup) -> None:
        self._loss, self._tp_group = loss, tp_group

    def __call__(self, output_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the loss, which every tp rank computes redundantly."""
        whole_BSV: Tensor = _AllGatherLogits.apply(output_BSV, self._tp_group)  # type: ignore[no-untyped-call]
        return self._loss(whole_BSV, targets_BS)


class _AllGatherLogits(torch.autograd.Function):
    """All-gather along the last dim; all ranks have the same gradient, so backward slices it without a reduction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_dim(x, -1, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def _require_whole_sequence(output: Tensor, targets_BS: Tensor, tp: int) -> None:
    """Raise ConfigError for an output, of the model or of the layers before its head, of another number of tokens."""
    if output.shape[:-1] == targets_BS.shape:
        return
    is_twice = tp > 1 and output.shape[:-1].numel() == tp * targets_BS.numel()
    advice = (
        "a role of a module before the last layer gathers the sequence, and so does the role head: remove one of them"
        if is_twice
        else "give the last layer the role head"
    )
    raise ConfigError(
        f"the model's forward returned {tuple(output.shape)} on this rank for targets of "
        f"{tuple(targets_BS.shape)}: under layout.tp it must return logits of the whole sequence for the rank's "
        f"shard of the vocabulary; {advice} in tensor_parallel"
    )


def vocab_parallel_losses(logits_BSV: Tensor, targets_BS: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return losses_T: the cross-entropy of each target in nats, in float32 at least; 0 for targets of -100.

    No rank ever holds whole rows of logits. The ranks of `group` hold equal shards of the vocabulary, in order.
    """
    _require_whole_sequence(logits_BSV, targets_BS, group.size())
    losses_T: Tensor = _VocabParallelLosses.apply(logits_BSV.flatten(0, -2), targets_BS.flatten(), group)  # type: ignore[no-untyped-call]
    return losses_T


class _VocabParallelLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide_TV = at_least_float32(logits_TV)
        row_T = target_T - group.rank() * wide_TV.shape[1]
        is_here_T = (row_T >= 0) & (row_T < wide_TV.shape[1])
        row_T = row_T.where(is_here_T, 0)
        max_T = all_reduce_max(wide_TV.amax(1), group)
        shifted_TV = wide_TV - max_T[:, None]
        target_logit_T = shifted_TV.gather(1, row_T[:, None])[:, 0].where(is_here_T, 0)
        probability_TV = shifted_TV.exp_()
        sums = torch.stack((probability_TV.sum(1), target_logit_T, is_here_T.type_as(wide_TV)))
        sum_T, target_logit_T, num_found_T = all_reduce_sum(sums, group)
        probability_TV /= sum_T[:, None]
        ctx.save_for_backward(probability_TV, row_T, is_here_T, target_T)
        ctx.dtype = logits_TV.dtype
        # An out-of-range target makes the loss infinite, which stops the run; checking would cost a device sync.
        losses_T: Tensor = (sum_T.log() - target_logit_T) / num_found_T
        return losses_T.where(target_T != -100, 0)

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None]:
        probability_TV, row_T, is_here_T, target_T = ctx.saved_tensors
        gradient_T = gradient_T.where(target_T != -100, 0)
        gradient_TV = probability_TV * gradient_T[:, None]
        gradient_TV.scatter_add_(1, row_T[:, None], (-gradient_T * is_here_T)[:, None])
        return gradient_TV.to(ctx.dtype), None, None
