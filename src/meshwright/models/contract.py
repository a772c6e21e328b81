"""What the trainer asks of any model, ours or yours.

    forward(inputs) -> output           `inputs` is a batch from the data: the tokens of a text source, or what your own
                                        data class returns first
    loss(output, targets) -> scalar     optional: the mean over the batch, differentiable; default: cross-entropy of the
                                        next token in float32. It must not change `output` in place
    blocks: nn.ModuleList               optional: the repeated part, in order. Each block is a unit of sharding (FSDP2),
                                        of recomputation and of torch.compile. Without it the model is one unit
    first_parts, last_parts             optional: names of the modules before and after the blocks, such as
    stage_width                         ("embedding",) and ("norm", "head"), and the width of what passes between
                                        blocks. With them a pipeline (pp) can cut the model between blocks: a stage is
                                        the same model in which other parts are None, blocks among them. forward skips
                                        those, and takes an earlier stage's output in place of the inputs
    initial(fqn) -> Normal | Constant   optional: how each parameter starts. With it the model is built on the meta
                                        device, and each rank fills its own part. Without it the model is built whole on
                                        the CPU of every rank under torch.manual_seed(train.seed): keep the constructor
                                        deterministic
    takes_positions = True              optional: forward(inputs, positions, documents): where in the sequence the
                                        inputs stand (1-D), and of which document each token is, or None. It is needed
                                        to share a sequence over ranks (cp), and for data.mask_documents
    tensor_parallel = {...}             optional: how ranks share each layer (tp): a role such as "column" for a pattern
                                        of module names such as "blocks.*.up" (parallelism/tensor/sharding_plan.py). The
                                        embedding is "vocabulary", the last layer "head"; x is [batch, sequence, width]
    casts_block_inputs = False          optional: a block gets its inputs as the model passes them. Without it those in
                                        floating point are cast to precision.compute

A mean loss is what makes the result independent of the number of ranks: the trainer averages it over microbatches and
data-parallel ranks, which all hold equally many samples. Parameters and floating-point buffers are float32 as built.
A parameter has one dim at least; one that two modules share lies within a block, or outside of all (shardable.py).
Persistent buffers are, after each step, rank 0's on every rank.
A model that has `initial` is asked for its buffers too, each of which starts as a Constant.
"""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.rope import at_least_float32

Loss = Callable[[Tensor, Tensor], Tensor]


def next_token_loss(output_BSV: Tensor, targets_BS: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Return the cross-entropy in nats, in float32 at least; targets of -100 do not count."""
    if not isinstance(output_BSV, Tensor) or output_BSV.shape[:-1] != targets_BS.shape:
        given = tuple(output_BSV.shape) if isinstance(output_BSV, Tensor) else type(output_BSV).__name__
        raise ConfigError(
            f"the model's forward returned {given} for targets of {tuple(targets_BS.shape)}, but the next-token loss "
            "needs a tensor of logits with one more dim, the vocabulary: correct forward, or give the model a "
            "loss(output, targets) of its own"
        )
    # Log-sum-exp over a large vocabulary loses too much in bfloat16.
    try:
        wide_TV = at_least_float32(output_BSV.flatten(0, -2))
        return F.cross_entropy(wide_TV, targets_BS.flatten(), ignore_index=-100, reduction=reduction)
    except IndexError:
        # Looking for it beforehand would make the CPU wait for a GPU at every step.
        raise ConfigError(
            f"the targets hold token {int(targets_BS.max())} but the model's forward returned {output_BSV.shape[-1]} "
            "logits: widen the last layer, or take a tokenizer with fewer tokens"
        ) from None


def loss_of(model: nn.Module) -> Loss:
    """Return the model's own `loss(output, targets)`, or next_token_loss where it has none."""
    loss = getattr(model, "loss", next_token_loss)
    if not callable(loss):
        raise ConfigError(
            f"{type(model).__name__}.loss is {type(loss).__name__}, but the trainer calls loss(output, targets): "
            "make it a method that returns a scalar tensor, or rename it"
        )
    return loss


def require_scalar(loss: object) -> None:
    """Raise ConfigError unless `loss` is a tensor of one number, as the mean over a batch is."""
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return
    given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise ConfigError(
        f"the model's loss(output, targets) returned {given}, but a scalar tensor is needed, the mean over the batch: "
        "correct that method"
    )


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the model's `blocks`, or an empty list where it has none: then the model is one unit."""
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        return nn.ModuleList()
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigError(
            f"{type(model).__name__}.blocks is {type(blocks).__name__}, but sharding wants the repeated modules "
            "in an nn.ModuleList: make it one, or rename it"
        )
    return blocks
