"""own_stack: our own trainer's stack as a layout changes it: what is compiled."""

from meshwright.spec.step.stack import Stack


def own_stack(stack: Stack, *, compiles_blocks: bool, compile_loss: bool, compile_optimizer: bool) -> Stack:
    """Return `stack`, which is eager, with the kernels of a layout; loss and optimizer are those of our own trainer."""
    changes = {"kernels": "compiled"} if compiles_blocks else {}
    if not stack.eager_mixtures:
        return stack.replace(**changes)
    return stack.replace(**changes, joins_loss=compile_loss, joins_update=compile_optimizer)
