"""Attention on the simulated accelerator is what it is on CUDA: kernels, with what torch puts around them."""

from __future__ import annotations

import pytest

from attention_steps import BATCH, HEADS, POSITIONS, WIDTH
from meshwright.spec.trace.trace import NONE, Signature, Trace
from meshwright.tracer.programs.trace_ranks import trace

Dims = list[tuple[int, ...]]
OF_HEADS = (BATCH, HEADS, POSITIONS, WIDTH)


@pytest.fixture(scope="module")
def found() -> Trace:
    return trace("attention_steps:attend", 0, 1)


def calls(found: Trace, name: str) -> list[Signature]:
    rows = (found.signatures[at] for at in found.records.signature if at != NONE)
    return [one for one in rows if one.op == f"aten.{name}.default"]


def inputs(one: Signature) -> Dims:
    return [shape.dims for shape in one.inputs]


def test_heads_are_filled_up_to_a_multiple_of_eight(found: Trace) -> None:
    filled = (BATCH, HEADS, POSITIONS, 40)
    assert inputs(calls(found, "_scaled_dot_product_flash_attention")[0])[:3] == [filled] * 3
    assert [one.outputs[0].dims for one in calls(found, "constant_pad_nd")[:3]] == [filled] * 3


def test_grouped_heads_are_not_repeated(found: Trace) -> None:
    (grouped,) = calls(found, "_scaled_dot_product_cudnn_attention")
    fewer = (BATCH, HEADS // 2, POSITIONS, WIDTH)
    assert inputs(grouped)[:3] == [OF_HEADS, fewer, fewer]
    assert not calls(found, "clone")


def test_a_mask_is_made_one_that_is_added_in_aligned_rows(found: Trace) -> None:
    masked = calls(found, "_scaled_dot_product_efficient_attention")[0]
    assert inputs(masked)[3] == (BATCH, HEADS, POSITIONS, POSITIONS)
    assert masked.inputs[3].dtype == "bfloat16"
    # It is 40 wide where it lies, and is looked at as if all heads had one.
    assert calls(found, "constant_pad_nd")[3].outputs[0].dims == (POSITIONS, 40)


def test_scores_are_kept_for_a_backward_only(found: Trace) -> None:
    _, trained, looked_at = calls(found, "_scaled_dot_product_efficient_attention")
    # Filled up to a multiple of 32 positions, one number for each.
    assert trained.outputs[1].dims == (BATCH, HEADS, 64)
    assert looked_at.outputs[1].dims == (BATCH, HEADS, 0)


def test_each_kernel_has_its_backward(found: Trace) -> None:
    for kernel, count in (("cudnn", 1), ("flash", 1), ("efficient", 2)):
        assert len(calls(found, f"_scaled_dot_product_{kernel}_attention_backward")) == count, kernel
