"""FlexAttention and varlen_attn on the simulated accelerator: an operator each, with the tensors that theirs has.

The kernels of FlexAttention are made by Inductor and Triton, for a device that exists; where documents end is data. So
a call is traced as one operator. It saves query, key, value, output and logsumexp, as both do; its FLOPs are those of
the scores that documents of the job's mean length and the window leave, in blocks of 128. Ignored: making the block
mask or the list of documents, once a microbatch.

Shapes: B batch, S positions, N query heads, K key/value heads, H width of a query or key head, W of a value head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.models.attention.flex_attention import FlexAttention
from meshwright.models.attention.varlen_attention import VarlenAttention
from meshwright.spec.model.op import computed_context
from meshwright.tracer.record.simulated_device import NAME

Heads = tuple[Tensor, Tensor, Tensor]
"""query_BSNH, key_BSKH and value_BSKW."""


def _forward(query: Tensor, key: Tensor, value: Tensor, context: float) -> tuple[Tensor, Tensor]:
    raise AssertionError("fake tensors never reach a kernel")


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, saved: Sequence[Tensor], context: float
) -> tuple[Tensor, Tensor, Tensor]:
    raise AssertionError("fake tensors never reach a kernel")


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, context: float) -> tuple[Tensor, Tensor]:
    # Positions lie before heads in memory, as in the model.
    batch, heads, length, _ = query.shape
    attended = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return attended, query.new_empty((batch, heads, length), dtype=torch.float32)


def _fake_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Heads:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.mean_context = inputs[3]


def _operator(name: str) -> Any:
    """Return the operator `name` of query [B, N, S, H], key, value and the mean keys that a query attends to."""
    forward = torch.library.custom_op(f"meshwright::{name}", _forward, mutates_args=())
    backward = torch.library.custom_op(f"meshwright::{name}_backward", _backward, mutates_args=())
    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)

    def gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *heads, attended, logsumexp = ctx.saved_tensors
        return (*backward(gradient, *heads, (attended, logsumexp), ctx.mean_context), None)

    forward.register_autograd(gradients, setup_context=_save)
    register_flop_formula(getattr(torch.ops.meshwright, name))(_flops)
    register_flop_formula(getattr(torch.ops.meshwright, f"{name}_backward"))(_backward_flops)
    return forward


def _flops(query: Any, key: Any, value: Any, context: float, *_: Any, **__: Any) -> int:
    batch, heads, length, width = query
    flops: int = round(2 * batch * heads * length * (width + value[-1]) * context)
    return flops


def _backward_flops(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **__: Any) -> int:
    return round(5 / 2 * _flops(query, key, value, rest[1]))


_OPERATORS = {FlexAttention: _operator("flex_attention"), VarlenAttention: _operator("varlen_attention")}


def as_operator(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `forward` of SparseAttention as one operator on the simulated accelerator."""

    @functools.wraps(forward)
    def attended(module: Any, *args: Any) -> Tensor:
        query = args[0]
        if query.device.type != NAME:
            return forward(module, *args)
        context = computed_context(query.shape[1], module.window, module.document_tokens)
        query, key, value = (x.transpose(1, 2) for x in args[:3])
        result: Tensor = _OPERATORS[type(module)](query, key, value, context)[0]
        return result.transpose(1, 2)

    return attended
