"""Operators by their exact names: those of the installed torch, and what is made of names that are not listed."""

from __future__ import annotations

import pytest
import torch

import meshwright.models.grouped_matmul
import meshwright.parallelism.context.blockwise_attention
import meshwright.tracer.record.sparse_attention  # noqa: F401
from meshwright.cost.compute.op_table import (
    TORCH_OPS,
    AttentionOp,
    CollectiveOp,
    MatmulOp,
    Moves,
    is_communication,
    op_name,
    torch_op,
)
from meshwright.spec.trace.trace import Signature

ELSEWHERE = {"meshwright.flex_attention", "meshwright.varlen_attention"}
"""What the tracer writes by itself."""

NO_COLLECTIVES = {
    "send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops", "wait_tensor", "check_for_nan",
    "_wrap_tensor_autograd",
}  # fmt: skip
PACKETS = {name.split(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}
"""Namespace and name of each operator of the installed torch."""


def signature(op: str) -> Signature:
    return Signature(op=op, inputs=(), outputs=())


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the names are those of torch 2.13")
def test_every_listed_operator_exists() -> None:
    missing = {name for name in TORCH_OPS if name.removesuffix("_backward") not in ELSEWHERE} - PACKETS
    assert missing == set()


def test_every_list_in_place_of_torch_is_listed() -> None:
    in_place = {name for name in PACKETS if name.startswith("aten._foreach_") and name.endswith("_")}
    assert in_place - set(TORCH_OPS) == set()


def test_every_collective_of_torch_is_listed() -> None:
    known = {name for name in PACKETS if is_communication(signature(f"{name}.default"))}
    collectives = {name for name, kind in TORCH_OPS.items() if isinstance(kind, CollectiveOp)}
    assert {name for name in known if name.split(".")[1] not in NO_COLLECTIVES} - collectives == set()


@pytest.mark.parametrize(
    ("op", "what"),
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
def test_an_operator_is_what_its_whole_name_says(op: str, what: object) -> None:
    assert torch_op(op) == what


def test_parts_of_names() -> None:
    assert op_name("aten.mm.default") == ("aten", "mm", "default")
    assert op_name("inductor.fused(add)") == ("inductor", "fused(add)", "")
    assert is_communication(signature("_c10d_functional.all_reduce.default"))
    assert not is_communication(signature("c10dish.all_reduce.default"))
