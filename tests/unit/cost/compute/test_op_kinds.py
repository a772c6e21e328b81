"""Operators by their exact names: those of the installed torch, and what is made of names that are not listed."""

from __future__ import annotations

import pytest
import torch

import meshwright.models.grouped_matmul
import meshwright.parallelism.context.blockwise_attention
import meshwright.tracer.record.sparse_attention  # noqa: F401
from meshwright.cost.compute.op_kinds import OPS, AttentionOp, MatmulOp, Moves, is_communication, kind_of_op, op_name
from meshwright.spec.trace.trace import Signature

ELSEWHERE = {"meshwright.flex_attention", "meshwright.varlen_attention", "aten.take_along_dim"}
"""What the tracer writes by itself, and what torch resolves before an operator is called."""


def signature(op: str) -> Signature:
    return Signature(op=op, inputs=(), outputs=())


def test_every_listed_operator_exists() -> None:
    packets = {name.split(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}
    missing = {name for name in OPS if name.removesuffix("_backward") not in ELSEWHERE} - packets
    assert missing == set()


def test_every_list_in_place_of_torch_is_listed() -> None:
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "aten::" in name}
    in_place = {name for name in names if name.startswith("_foreach_") and name.endswith("_")}
    assert {name for name in in_place if f"aten.{name}" not in OPS} == set()


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten.mm.default", MatmulOp()),
        ("aten.mm.out", MatmulOp()),
        ("mine.mm.default", Moves.IN_AND_OUT),
        ("aten.add.out", Moves.OVER),
        ("aten.add.Tensor", Moves.IN_AND_OUT),
        ("inductor.fused(mm, add)", Moves.IN_AND_OUT),
        (
            "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
            AttentionOp("published", is_backward=True),
        ),
    ],
)
def test_an_operator_is_what_its_whole_name_says(op: str, kind: object) -> None:
    assert kind_of_op(signature(op)) == kind


def test_parts_of_names() -> None:
    assert op_name(signature("aten.mm.default")) == ("aten", "mm", "default")
    assert op_name(signature("inductor.fused(add)")) == ("inductor", "fused(add)", "")
    assert is_communication(signature("_c10d_functional.all_reduce.default"))
    assert not is_communication(signature("c10dish.all_reduce.default"))
