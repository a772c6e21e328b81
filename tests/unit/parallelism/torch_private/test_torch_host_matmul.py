"""Matrices that oneDNN multiplies on the host are those of torch's own kernels; in a process of their own.

Ranks on AMD's processors train so (trainer/launch/host_process.py); here on any processor.
"""

import json
import subprocess
import sys

import pytest
import torch

_PROGRAM = '''
import itertools, json, random, sys
import torch, torch.nn.functional as F
from meshwright.parallelism.torch_private.torch_host_matmul import multiply_by_onednn

def operand(rows, columns, dtype):
    """Return a matrix: contiguous, transposed, or part of a larger one."""
    kind = draw.choice(("whole", "transposed", "part"))
    if kind == "whole":
        return torch.randn(rows, columns, dtype=dtype)
    if kind == "transposed":
        return torch.randn(columns, rows, dtype=dtype).t()
    return torch.randn(rows + 3, columns + 5, dtype=dtype)[2 : rows + 2, 1 : columns + 1]

def off(product, exact):
    scale = exact.abs().max().item() if exact.numel() else 0.0
    return (product.double() - exact).abs().max().item() / scale if scale else 0.0

draw = random.Random(7)
torch.manual_seed(7)
cases, small = [], torch.randn(16, 16)
for _ in range(int(sys.argv[2])):
    rows, inner, columns = (draw.choice((0, 1, 2, 48, 130, 256, 517)) for _ in range(3))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64))
    cases.append((operand(rows, inner, dtype), operand(inner, columns, dtype), torch.randn(columns, dtype=dtype)))
before = [torch.addmm(bias, left, right) for left, right, bias in cases], small @ small
if sys.argv[1] == "onednn":
    multiply_by_onednn()
    multiply_by_onednn()
found = {"mm": 0.0, "addmm": 0.0, "out": 0.0, "float64": 0.0, "scaled": 0.0}
for (left, right, bias), by_torch in zip(cases, before[0], strict=True):
    exact = left.double() @ right.double()
    found["mm"] = max(found["mm"], off(left @ right, exact))
    found["addmm"] = max(found["addmm"], off(F.linear(left, right.t(), bias), exact + bias))
    into = torch.empty(right.shape[1], left.shape[0], dtype=left.dtype).t()
    torch.mm(left, right, out=into)
    found["out"] = max(found["out"], off(into, exact))
    scaled = torch.addmm(bias, left, right, beta=0.5, alpha=2.0)
    found["scaled"] = max(found["scaled"], off(scaled, 0.5 * bias.double() + 2 * exact))
    if left.dtype is torch.float64:
        found["float64"] = max(found["float64"], (torch.addmm(bias, left, right) - by_torch).abs().sum().item())
x, layer = torch.randn(4, 128, 256, requires_grad=True), torch.nn.Linear(256, 384)
layer(x).square().sum().backward()
double_x, double_layer = x.detach().double().requires_grad_(), torch.nn.Linear(256, 384).double()
double_layer.load_state_dict(layer.state_dict())
double_layer(double_x).square().sum().backward()
found["input gradient"] = off(x.grad, double_x.grad)
found["weight gradient"] = off(layer.weight.grad, double_layer.weight.grad)
large = torch.randn(256, 256)
with torch.profiler.profile() as profile:
    large @ large
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        large @ large
    small @ small
found["onednn"] = sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events())
for bad in ((large, small), (large, large.double()), (large, large[0, :1, None].expand(3, 1))):
    try:
        torch.mm(*bad)
    except RuntimeError as error:
        found.setdefault("errors", []).append(str(error))
found["same small"] = torch.equal(small @ small, before[1])
print(json.dumps(found))
'''


def _run(kind: str, num_products: int) -> dict[str, object]:
    command = (sys.executable, "-W", "error", "-c", _PROGRAM, kind, str(num_products))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")
@pytest.mark.parametrize("num_products", [6, pytest.param(40, marks=pytest.mark.long)])
def test_products_are_those_of_torch(num_products: int) -> None:
    by_torch, by_onednn = _run("torch", num_products), _run("onednn", num_products)
    # The large one while oneDNN is on.
    assert (by_torch.pop("onednn"), by_onednn.pop("onednn")) == (0, 1)
    assert by_onednn.pop("errors") == by_torch.pop("errors")
    assert by_onednn.pop("same small") is True
    assert by_onednn.pop("float64") == 0.0
    for key in by_onednn:
        assert float(str(by_onednn[key])) < 2e-6, (key, by_torch[key])
