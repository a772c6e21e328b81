"""CompiledAdamW computes what torch's AdamW computes of gradients that were scaled before."""

import pytest
import torch
from torch import nn

from meshwright.trainer.optimizer.compiled_adamw import CompiledAdamW


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_adamw(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, dtype=dtype, generator=generator) for shape in ((3, 5), (7,), (0, 5), (1,))]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    groups = [{"params": ours[:2], "weight_decay": 0.1}, {"params": ours[2:], "weight_decay": 0.0}]
    compiled = CompiledAdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, backend="eager")
    groups = [{"params": theirs[:2], "weight_decay": 0.1}, {"params": theirs[2:], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 4):
        scale = torch.tensor(0.5 / step, dtype=torch.float64)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, dtype=dtype, generator=generator)
            other.grad = one.grad * scale.to(dtype)
        compiled.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 1e-2 / step
        compiled.step(scale)
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        assert compiled.state[one].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, state in compiled.state[one].items():
            torch.testing.assert_close(state, plain.state[other][name], rtol=1e-5, atol=1e-7)
