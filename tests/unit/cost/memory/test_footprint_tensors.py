"""What a block keeps for backward is what torch keeps of our own modules, whatever is recomputed."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.cost.memory.footprint_tensors import Formats, kept_bytes, transient_bytes
from meshwright.models.build import build_architecture
from meshwright.parallelism.activation_checkpoint import checkpoint_blocks
from meshwright.spec.layout.layout import ActivationCheckpoint, Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_spec import BlockGroup, model_spec, transformer_spec
from meshwright.spec.model.moe_architecture import LatentAttention, MoEArchitecture
from meshwright.spec.model.transformer_ops import AttentionConfig, BlocksConfig, MLPConfig, TransformerConfig
from meshwright.spec.step.stack import Stack
from meshwright.spec.step.workload import Workload

BATCH, SEQ_LEN = 2, 64
SIZES = {
    "vocab_size": 288,
    "dim": 256,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
    "ffn_dim": 640,
    "rope_theta": 10_000.0,
    "max_seq_len": 4096,
}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_dim": 320}
# Values as wide as queries: the CPU has flash attention for nothing else.
LATENT = LatentAttention(query_rank=64, kv_rank=32, plain_head_dim=32, rope_head_dim=16, value_head_dim=48)
ARCHITECTURES = {
    "llama": LlamaArchitecture(**SIZES),
    "qwen3": LlamaArchitecture(**SIZES, qk_norm=True),
    "mixture": MoEArchitecture(**SIZES, **EXPERTS),
    "deepseek": MoEArchitecture(
        **SIZES | {"num_kv_heads": 8, "head_dim": 48},
        **EXPERTS,
        num_shared_experts=1,
        num_dense_layers=1,
        latent=LATENT,
    ),
}
EAGER = Stack(name="eager", title="eager", kernels="eager")
FUSED = Stack(name="fused", title="fused", kernels="fused", selective="core-attention")


class _KernelNorm(torch.autograd.Function):
    """What CUDA's kernel keeps of a norm: the input as it is, and one number for each vector. The CPU keeps copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


@pytest.fixture(autouse=True)
def _kernel_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: _KernelNorm.apply(x, weight, eps))


class _Made(TorchDispatchMode):
    """Notes the storage of every tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.storages.setdefault(reference.cdata, (reference, storage.nbytes()))
        return result


def _measured_bytes(architecture: LlamaArchitecture, policy: ActivationCheckpoint) -> float:
    """Return the bytes of each token that are alive after the last block's forward: its input, and what it keeps."""
    model = build_architecture(architecture).to(torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    checkpoint_blocks(model.blocks, Layout(activation_checkpoint=policy))
    x_BSD = torch.randn(BATCH, SEQ_LEN, architecture.dim, dtype=torch.bfloat16, requires_grad=True)
    angles = model.rope(architecture, torch.arange(SEQ_LEN))
    made = _Made()
    with made:
        output_BSD = model.blocks[-1](x_BSD, *angles, None, None)
    gc.collect()
    others = [*model.parameters(), *model.buffers(), *angles, output_BSD, x_BSD]
    not_kept = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in others}
    alive = [size for key, (storage, size) in made.storages.items() if key not in not_kept and not storage.expired()]
    return (sum(alive) + x_BSD.untyped_storage().nbytes()) / (BATCH * SEQ_LEN)


def _formats(stack: Stack, precision: Any = "bfloat16") -> Formats:
    return Formats.of(Workload(seq_len=SEQ_LEN, global_batch_size=1, precision=precision), stack, stack.kernels)


def _block(name: str) -> BlockGroup:
    return model_spec(ARCHITECTURES[name]).groups[-2]


def _kept(name: str, policy: ActivationCheckpoint, formats: Formats) -> float:
    """Return the bytes of each token that the last block keeps on a single rank."""
    parts = kept_bytes(_block(name).ops, formats, policy)
    return sum(parts.get(split, 0.0) for split in ("stream", "gathered", "latent", "heads", "product", "rows"))


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_block_keeps_what_torch_keeps(name: str, policy: ActivationCheckpoint) -> None:
    # Routing indices, counts and the router's weight in float32 are left out: 3 % here, where a token is narrow.
    tolerance = 0.03 if isinstance(ARCHITECTURES[name], MoEArchitecture) else 0.0
    assert _kept(name, policy, _formats(EAGER)) == pytest.approx(
        _measured_bytes(ARCHITECTURES[name], policy), rel=max(tolerance, 1e-9)
    )


@pytest.mark.parametrize("stack", [EAGER, EAGER.replace(kernels="compiled"), FUSED])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_more_recomputation_keeps_less(name: str, stack: Stack) -> None:
    none, selective, full = (_kept(name, policy, _formats(stack)) for policy in ("none", "selective", "full"))
    assert none >= selective > full


def test_megatron_keeps_what_its_authors_count() -> None:
    """34 + 5 heads seq / dim bytes of an element for GPT (arXiv:2205.05198), less the 2 of dropout's masks."""
    dim, heads = 256, 8
    attention = AttentionConfig(heads, heads, dim // heads, has_rope=False)
    gpt = TransformerConfig(256, dim, (BlocksConfig(1, attention, MLPConfig(4 * dim, is_gated=False)),))
    parts = kept_bytes(transformer_spec(gpt).groups[1].ops, _formats(FUSED.replace(attention="unfused")), "none")
    norms_bytes = 2 * 4
    assert (
        sum(parts[split] for split in ("stream", "gathered", "heads", "product")) - norms_bytes
        == dim * (34 - 2) + 5 * heads * SEQ_LEN
    )


def test_core_attention_recomputes_the_probabilities_only() -> None:
    formats = _formats(FUSED.replace(attention="unfused"))
    probabilities = SIZES["num_heads"] * SEQ_LEN * 5
    assert _kept("llama", "none", formats) - _kept("llama", "selective", formats) == probabilities


def test_every_second_matmul_keeps_less_than_all() -> None:
    half = EAGER.replace(selective="half-of-matmul-outputs")
    assert _kept("llama", "full", _formats(half)) < _kept("llama", "selective", _formats(half))
    assert _kept("llama", "selective", _formats(half)) < _kept("llama", "selective", _formats(EAGER))


def test_a_compiled_block_does_not_keep_what_backward_does_not_read() -> None:
    eager, compiled = _formats(EAGER), _formats(EAGER.replace(kernels="compiled"))
    # The output of the last matmul, in 16 bits.
    assert _kept("llama", "selective", eager) - _kept("llama", "selective", compiled) == 2 * SIZES["dim"]
    assert _kept("mixture", "selective", eager) == _kept("mixture", "selective", compiled)


def test_attention_that_is_recomputed_keeps_no_output() -> None:
    formats = _formats(EAGER)
    kept, dropped = (_kept("llama", "selective", formats._replace(drops_attention=drops)) for drops in (False, True))
    # The output in 16 bits, and a float32 sum for each query.
    assert kept - dropped == SIZES["num_heads"] * (2 * SIZES["head_dim"] + 4)


def test_low_precision_is_kept_by_kernels_written_for_it() -> None:
    plain, low = (_kept("llama", "none", _formats(FUSED, precision)) for precision in ("bfloat16", "mxfp8"))
    assert low < plain
    assert _kept("llama", "none", _formats(EAGER, "mxfp8")) == _kept("llama", "none", _formats(EAGER))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_of_one_op_are_less_than_what_a_block_keeps(name: str) -> None:
    formats = _formats(EAGER)
    assert 0 < sum(transient_bytes(_block(name).ops, formats).values()) < _kept(name, "none", formats)
