"""Operations are told apart by their names in torch."""

from __future__ import annotations

import pytest

from meshwright.spec.model.op import op_kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.mm.default", "matmul"),
        ("aten.addmm.default", "matmul"),
        ("aten.bmm.default", "matmul"),
        ("aten.baddbmm.default", "matmul"),
        ("aten._grouped_mm.default", "matmul"),
        ("aten._scaled_mm.default", "matmul"),
        ("meshwright.grouped_matmul_by_loop.default", "matmul"),
        ("meshwright.grouped_matmul_by_loop_weight_gradient", "matmul"),
        ("aten._scaled_dot_product_flash_attention.default", "attention"),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "attention"),
        ("aten.mul.Tensor", "other"),
        ("aten._fused_rms_norm.default", "other"),
        ("aten._log_softmax.default", "other"),
        ("aten.embedding.default", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert op_kind(name) == kind
