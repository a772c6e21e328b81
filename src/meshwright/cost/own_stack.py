"""own_stack: our own trainer's stack as a layout changes it: what is compiled, what is replayed."""

from typing import Any, NamedTuple

from meshwright.spec.step.stack import Stack


class OwnChoices(NamedTuple):
    """Keys of a layout that change which kernels its step has, and who launches them."""

    compiles_blocks: bool
    compile_loss: bool
    compile_optimizer: bool
    cuda_graphs: bool


def own_stack(stack: Stack, choices: OwnChoices) -> Stack:
    """Return `stack`, which is eager, with the kernels of a layout; other software only compiles blocks."""
    changes: dict[str, Any] = {"kernels": "compiled"} if choices.compiles_blocks else {}
    if stack.eager_mixtures:
        changes |= {"joins_loss": choices.compile_loss, "joins_update": choices.compile_optimizer}
        changes |= {"cuda_graphs": "step"} if choices.cuda_graphs else {}
    return stack.replace(**changes)
