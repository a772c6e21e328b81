"""flops_of: the FLOPs of an operator, as torch.utils.flop_counter counts them.

The same in torch 2.11 to 2.15, but for fused attention on a CPU: 2.15 counts it, those before do not.
"""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from meshwright.parallelism.torch_private.torch_dispatch import argument_names


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of one call of an operator; 0 of one that torch has no count for."""
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    if func._opname.startswith("_scaled_dot_product"):
        args = _with_equal_heads(func, args)
    return int(count(*args, **kwargs, out_val=result))


def _with_equal_heads(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """2.11 counts no attention whose keys have fewer heads than its queries; each of them serves several."""
    given = dict(zip(argument_names(func), args, strict=False))
    heads = given["query"].shape[-3]
    given |= {name: (*given[name].shape[:-3], heads, *given[name].shape[-2:]) for name in ("key", "value")}
    return list(given.values())
