"""Models on a CUDA device: the same initial weights to the bit, nearly the same logits."""

import pytest
import torch

from meshwright.models.attention.causal_attention import KVCache
from meshwright.models.initial import fill_normal, initialize
from meshwright.models.llama import Llama
from meshwright.models.moe import Experts
from meshwright.spec.model.presets import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_weights_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    shape = (1031, 4099)
    here, there = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype, device="cuda")
    for out in (here, there):
        fill_normal(out, seed=5, name="weight", global_shape=shape, offsets=(0, 0), std=0.02)
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_logits_equal_those_of_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    model = Llama(PRESETS["llama-1m"])
    initialize(model, seed=0)
    tokens_BS = torch.randint(0, 257, (2, 64))
    with torch.no_grad():
        here_BSV = model(tokens_BS)
        model.to("cuda", dtype)
        there_BSV = model(tokens_BS.cuda())
        cache = KVCache(4, max_len=64)
        parts = [model(part_BS, cache=cache) for part_BS in tokens_BS.cuda().split([40, 23, 1], dim=1)]
    torch.testing.assert_close(there_BSV.float().cpu(), here_BSV, rtol=0, atol=tolerance)
    torch.testing.assert_close(torch.cat(parts, dim=1), there_BSV, rtol=0, atol=tolerance)


@pytest.mark.parametrize("counts", [[3, 0, 21, 8], [32, 0, 0, 0], [1, 1, 1, 29]])
def test_experts_of_any_number_of_rows_equal_those_of_the_cpu(counts: list[int]) -> None:
    torch.manual_seed(0)
    here = Experts(4, dim=32, ffn_dim=48)
    for parameter in here.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows_RD = torch.randn(sum(counts), 32)
    gradients = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        experts = here.to(device, dtype)
        out_RD = experts(rows_RD.to(device, dtype), torch.tensor(counts, device=device))
        gradients.append([g.float().cpu() for g in torch.autograd.grad(out_RD.square().sum(), experts.parameters())])
    for cpu, cuda in zip(*gradients, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=0.05, atol=0.05 * cpu.abs().max().item())
