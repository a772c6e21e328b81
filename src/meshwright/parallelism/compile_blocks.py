"""torch.compile on the blocks of a model: which parts of each block, and the compiler's options."""

from collections import Counter
from functools import cache
from typing import Any

from torch import distributed as dist
from torch import nn

from meshwright.log import logger
from meshwright.parallelism.activation_checkpoint import checkpoints_of
from meshwright.parallelism.torch_private.torch_compat import keep_backward_inputs
from meshwright.parallelism.torch_private.torch_compiler import (
    overlap_collectives,
    save_meshes_last,
    trust_vector_instructions,
)
from meshwright.spec.layout.layout import ActivationCheckpoint, Layout

_SINGLE_OPS = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm)
"""Modules of one kernel: compiled alone they gain nothing and cost a guard check per call."""


def compile_blocks(blocks: nn.ModuleList, layout: Layout) -> Counter[str]:
    """Compile each block in place and return the number of compiled modules by class.

    Of a block with a submodule that cannot be compiled (`is_eager`), the largest submodules without one are compiled;
    under selective recomputation none are (Layout.compiles_recomputed). A graph break is an error, since it would
    silently lose speed.
    """
    prepare_compile(layout)
    compiled: Counter[str] = Counter()
    for index, checkpoint in checkpoints_of(blocks, layout):
        for part in _parts_to_compile(blocks[index], checkpoint):
            if type(part).forward.__module__.startswith("torch."):
                _give_own_frame(part)
            part.compile(backend=layout.compile_backend, fullgraph=True)
            compiled[_class_name(part)] += 1
    return compiled


def _give_own_frame(module: nn.Module) -> None:
    """Have `module`, of a class of torch's such as nn.Sequential, run its forward from a function outside of torch.

    Where hooks run around a forward, as FSDP2's do, Dynamo compiles the forward alone, and none of torch's own files.
    """
    forward = module.forward

    def forward_of_torch(*args: Any, **options: Any) -> Any:
        return forward(*args, **options)

    module.forward = forward_of_torch


def _parts_to_compile(block: nn.Module, checkpoint: ActivationCheckpoint) -> list[nn.Module]:
    parts = _compilable_parts(block)
    if parts == [block] or checkpoint != "selective":
        return parts
    _warn_once(_class_name(block))
    return []


@cache
def _warn_once(block: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(
            "layout.compile = true has no effect on %s: it contains an eager module (experts of ep, attention in a "
            "ring or by varlen), with which selective recomputation cannot be compiled; set "
            "layout.activation_checkpoint to full",
            block,
        )


def prepare_compile(layout: Layout) -> None:
    """Set the compiler's options for `layout`, before any block is compiled.

    A backward in two parts runs a compiled block's backward twice on the same saved tensors, which the compiler would
    by default overwrite with results. A recomputed block needs random states and meshes saved in order.
    """
    if layout.compile_backend == "inductor":
        trust_vector_instructions()
    if layout.may_split_backward:
        keep_backward_inputs()
    if layout.recomputes:
        save_meshes_last()
    if layout.tp > 1:
        overlap_collectives()


def _compilable_parts(module: nn.Module) -> list[nn.Module]:
    """Return the largest modules in `module`, itself included, that contain no eager module."""
    has_forward = type(module).forward is not nn.Module.forward
    if has_forward and not any(getattr(part, "is_eager", False) for part in module.modules()):
        return [] if isinstance(module, _SINGLE_OPS) else [module]
    return [part for child in module.children() for part in _compilable_parts(child)]


def _class_name(module: nn.Module) -> str:
    return type(getattr(module, "_checkpoint_wrapped_module", module)).__name__
