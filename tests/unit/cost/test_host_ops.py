"""Seconds of operators on a calibrated host."""

import pytest

from meshwright.cost.host.host_ops import HostOps
from meshwright.hardware.catalogue import load_device
from meshwright.spec.trace.trace import Signature, TensorShape


def test_a_layer_with_a_bias_costs_what_its_matmul_does() -> None:
    # `calibrate` profiles models without biases.
    host = HostOps(load_device("cpu-local"))
    x, weight, bias, out = (TensorShape(dtype="float32", dims=dims) for dims in ((64, 128), (128, 32), (32,), (64, 32)))
    flops, num_bytes = 2 * 64 * 128 * 32, 4 * (64 * 128 + 128 * 32)
    matmul, layer = (
        Signature(op=op, inputs=inputs, outputs=(out,), flops=flops, read_bytes=num_bytes, written_bytes=4 * 64 * 32)
        for op, inputs in (("aten.mm.default", (x, weight)), ("aten.addmm.default", (bias, x, weight)))
    )
    assert host.seconds(layer) == pytest.approx(host.seconds(matmul))
    assert host.seconds(layer) > 0


def test_what_only_allocates_moves_nothing() -> None:
    host = HostOps(load_device("cpu-local"))
    small, large = (
        Signature(
            op="aten.empty.memory_format",
            inputs=(),
            outputs=(TensorShape(dtype="float32", dims=(size,)),),
            flops=0,
            read_bytes=0,
            written_bytes=4 * size,
        )
        for size in (1, 1 << 24)
    )
    assert host.seconds(large) == host.seconds(small) > 0
