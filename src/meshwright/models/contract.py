"""Interface between the trainer and any model, built-in or user-defined.

    forward(inputs) -> output           `inputs` is a batch: tokens of a text source, or the inputs of your data class
    loss(output, targets) -> scalar     optional: the mean over the batch, differentiable; default: cross-entropy of the
                                        next token in float32. It must not modify `output` in place
    blocks: nn.ModuleList               optional: the repeated layers, in order. Each block is a unit of FSDP2, of
                                        recomputation and of torch.compile. Without it the model is one unit
    first_parts, last_parts             optional: names of the modules before and after the blocks, such as
    stage_width                         ("embedding",) and ("norm", "head"), and the width of the activations between
                                        blocks. With them a pipeline (pp) can split the model between blocks: a stage is
                                        the same model with all other parts and blocks set to None. forward skips those,
                                        and takes the previous stage's output in place of the inputs
    initial(fqn) -> Normal | Constant   optional: initial values of each parameter. With it the model is built on the
                                        meta device, and each rank fills its shards. Without it the model is built whole
                                        on the CPU of every rank under torch.manual_seed(train.seed): keep the
                                        constructor deterministic
    takes_positions = True              optional: forward(inputs, positions, documents): positions in the sequence
                                        (1-D; [batch, sequence] with data.packing = "whole", where each document counts
                                        from 0), and the document of each token, or None. Required for context
                                        parallelism (cp) and for data.mask_documents
    tensor_parallel = {...}             optional: sharding of each layer (tp): a role such as "column" for a pattern
                                        of module names such as "blocks.*.up" (parallelism/tensor/sharding_plan.py;
                                        docs/how_to/own_model.md has a table with all roles that a model needs). The
                                        embedding is "vocabulary", the last layer "head"; x is [batch, sequence, width].
                                        With layout.loss_chunks the loss computes the layer "head" itself, also without
                                        tp: an nn.Linear, whose output forward returns as it is
    hugging_face = HuggingFaceFormat    optional: names and layouts of the tensors in a Hugging Face folder, and its
                                        config.json (meshwright.hf); or a method that returns it. Required for export,
                                        import and model.initial_weights
    casts_block_inputs = False          optional: a block gets its inputs as the model passes them. Without it those in
                                        floating point are cast to precision.compute

A loss of the model's own must be a mean: the trainer averages it over microbatches and data-parallel ranks, which have
equally many samples, so that the result does not depend on the number of ranks. The built-in loss ignores targets of
-100: it is the mean over all other targets of the global batch, however many each microbatch has
(parallelism/losses/loss.py). Parameters and floating-point buffers must be
float32 as built. A parameter has at least one dim; one that two modules share is within one block, or outside of all
(shardable.py). After each step, persistent buffers on every rank are rank 0's. `initial` must return a Constant for
each buffer too.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.initial import Constant
from meshwright.models.rope import at_least_float32
from meshwright.units import first_of

Loss = Callable[[Tensor, Tensor], Tensor]


def next_token_loss(
    output_BSV: Tensor, targets_BS: Tensor, reduction: Literal["mean", "sum", "none"] = "mean"
) -> Tensor:
    """Return the cross-entropy in nats, in float32 at least; targets of -100 are ignored; "none" returns losses_T."""
    if not isinstance(output_BSV, Tensor) or output_BSV.shape[:-1] != targets_BS.shape:
        given = tuple(output_BSV.shape) if isinstance(output_BSV, Tensor) else type(output_BSV).__name__
        raise ConfigError(
            f"the model's forward returned {given} for targets of {tuple(targets_BS.shape)}, but the next-token loss "
            "needs a tensor of logits with one more dim, the vocabulary: correct forward, or give the model a "
            "loss(output, targets) of its own"
        )
    # bfloat16 is too imprecise for logsumexp over a large vocabulary.
    try:
        wide_TV = at_least_float32(output_BSV.flatten(0, -2))
        return F.cross_entropy(wide_TV, targets_BS.flatten(), ignore_index=-100, reduction=reduction)
    except IndexError:
        # Checking it first would sync with the GPU at every step.
        raise ConfigError(
            f"the targets hold token {int(targets_BS.max())} but the model's forward returned {output_BSV.shape[-1]} "
            "logits: widen the last layer, or take a tokenizer with fewer tokens"
        ) from None


def loss_of(model: nn.Module) -> Loss:
    """Return the model's own `loss(output, targets)`, or next_token_loss."""
    loss = getattr(model, "loss", next_token_loss)
    if not callable(loss):
        raise ConfigError(
            f"{type(model).__name__}.loss is {type(loss).__name__}, but the trainer calls loss(output, targets): "
            "make it a method that returns a scalar tensor, or rename it"
        )
    return loss


def require_scalar(loss: object) -> None:
    """Raise ConfigError unless `loss` is a scalar tensor."""
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return
    given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise ConfigError(
        f"the model's loss(output, targets) returned {given}, but a scalar tensor is needed, the mean over the batch: "
        "correct that method"
    )


def is_stage_without_blocks(model: nn.Module) -> bool:
    """Return whether `model` is a pipeline stage that has none of the model's blocks."""
    blocks = blocks_of(model)
    return len(blocks) > 0 and all(block is None for block in blocks)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the model's `blocks`, or an empty list if it has none and is one unit."""
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        return nn.ModuleList()
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigError(
            f"{type(model).__name__}.blocks is {type(blocks).__name__}, but must be an nn.ModuleList of the repeated "
            "modules: make it one, or rename it"
        )
    return blocks


def require_shardable(model: nn.Module) -> None:
    """Raise ConfigError if `model`, as built, violates models/contract.py."""
    parameters = dict(model.named_parameters())
    others = [name for name, parameter in parameters.items() if parameter.dtype != torch.float32]
    if others:
        raise ConfigError(
            f"{type(model).__name__} holds {first_of(others)} in {parameters[others[0]].dtype}, but parameters are "
            "float32 as built, and precision.compute says in what they are computed: build the model in float32"
        )
    if scalars := [name for name, parameter in parameters.items() if parameter.dim() == 0]:
        raise ConfigError(
            f"{type(model).__name__} holds {first_of(scalars)} without a dim, but parameters are sharded along dim 0: "
            "give it one, such as nn.Parameter(torch.ones(1))"
        )
    if across := _shared_across_units(model):
        raise ConfigError(
            f"{type(model).__name__} uses one parameter as {' and '.join(across)}, but each block is an FSDP unit of "
            "its own: share within a block or outside of all, or rename `blocks`, which makes the model one unit"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        _require_filled_buffers(model)


def _require_filled_buffers(model: nn.Module) -> None:
    unfilled = [name for name, _ in model.named_buffers() if not isinstance(model.initial(name), Constant)]  # type: ignore[operator]
    if unfilled:
        raise ConfigError(
            f"{type(model).__name__} has initial(fqn), and so is built without memory, but keeps {first_of(unfilled)} "
            "as buffers, which nothing would fill: let initial return a Constant for them, compute them in forward, or "
            "leave initial out"
        )


def _shared_across_units(model: nn.Module) -> list[str]:
    """Return the names of a parameter that several FSDP units hold; [] if there is none."""
    names: dict[nn.Parameter, dict[int, str]] = {}
    in_blocks: set[nn.Module] = set()
    for index, block in enumerate(blocks_of(model)):
        in_blocks.update(block.modules())
        for name, parameter in block.named_parameters():
            names.setdefault(parameter, {})[index] = f"blocks.{index}.{name}"
    for module_name, module in model.named_modules():
        if module not in in_blocks:
            for name, parameter in module.named_parameters(recurse=False):
                names.setdefault(parameter, {})[-1] = f"{module_name}.{name}".lstrip(".")
    return next((list(by_unit.values()) for by_unit in names.values() if len(by_unit) > 1), [])
