"""One bit of one number changes, and it stays finite; digests see any such change."""

import pytest
import torch
from torch import nn

from meshwright.fault_tolerance.corruption.tensor_digest import _sums, digest_of
from meshwright.fault_tolerance.injection.number_faults import flip_bit, spoil
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.spec.fault import Fault, injection_problems


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_changes_the_largest_number_by_a_quarter_to_a_half(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.5, -3.0, 1.0], dtype=dtype)
    before, digest = tensor.clone(), digest_of([tensor])
    flip_bit(tensor)
    changed = (tensor != before).nonzero().tolist()
    assert changed == [[1]]
    assert 0.24 <= abs(float(tensor[1]) / -3.0 - 1) <= 0.51
    assert digest_of([tensor]) != digest
    flip_bit(tensor)
    assert digest_of([tensor]) == digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_sums_of_a_device_see_bits_and_places(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 9).to(dtype)
    swapped = tensor[torch.tensor([1, 0, *range(2, 8)])]
    assert not torch.equal(_sums(tensor), _sums(swapped))
    changed = tensor.clone()
    changed[3] += 1
    assert int(_sums(changed)[0]) != int(_sums(tensor)[0])
    assert torch.equal(_sums(tensor), _sums(tensor.clone()))


def model() -> Stages:
    torch.manual_seed(0)
    return Stages({0: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))}, (0,))


@pytest.mark.parametrize("kind", ["flip-gradient", "nan-gradient", "flip-parameter"])
def test_one_number_of_the_largest_tensor_changes(kind: str) -> None:
    stages = model()
    stages[0](torch.randn(3, 4)).sum().backward()
    read = {
        name: (parameter.detach().clone(), parameter.grad.clone())
        for name, parameter in stages.named_parameters()
        if parameter.grad is not None
    }
    spoil(Fault.model_validate({"kind": kind, "rank": 0}), stages)
    differs = {
        name: (int((parameter != read[name][0]).sum()), int((parameter.grad != read[name][1]).sum()))
        for name, parameter in stages.named_parameters()
        if parameter.grad is not None
    }
    wanted = (1, 0) if kind == "flip-parameter" else (0, 1)
    assert differs.pop("stages.0.0.weight") == wanted
    assert set(differs.values()) == {(0, 0)}


def test_a_loss_spike_is_of_one_forward() -> None:
    stages, inputs = model(), torch.randn(3, 4)
    usual = stages[0](inputs)
    spoil(Fault(kind="loss-spike", rank=0, argument=100.0), stages)
    assert torch.equal(stages[0](inputs), usual * 100)
    assert torch.equal(stages[0](inputs), usual)


def test_what_a_number_fault_cannot_be_is_said() -> None:
    faults = [Fault(kind="loss-spike", rank=0), Fault(kind="flip-gradient", rank=0, phase="forward")]
    problems = injection_problems(faults, 1, 8)
    assert "argument = 0 of a loss-spike: say by how much" in problems[0]
    assert 'phase = "forward" of a flip-gradient: leave it out' in problems[1]
