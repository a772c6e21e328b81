"""Gradients of a captured step stay at their addresses and start each step at zero."""

import torch
from torch import nn

from meshwright.parallelism.graph.cuda_graph import GradientBuffers


def test_gradients_accumulate_in_the_same_memory_from_the_second_step_on() -> None:
    model, unused = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    parameters = [*model.parameters(), unused]
    buffers = GradientBuffers(parameters)
    inputs = torch.arange(6.0).reshape(2, 3)
    addresses, sums = [], []
    for _ in range(3):
        buffers.begin_step()
        for microbatch in inputs:
            model(microbatch).sum().backward()
        buffers.end_step()
        assert unused.grad is None
        assert model.weight.grad is not None
        addresses.append(model.weight.grad.data_ptr())
        sums.append(model.weight.grad.clone())
        # As an optimizer's zero_grad does.
        for parameter in parameters:
            parameter.grad = None
    assert addresses[1] == addresses[2]
    assert sums[0].equal(inputs.sum(0).expand(2, 3))
    assert sums[1].equal(sums[0])
    assert sums[2].equal(sums[0])
