"""Llama against transformers, against itself with a cache, and against its ModelSpec."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.attention.causal_attention import KVCache
from meshwright.models.build import build_architecture
from meshwright.models.contract import next_token_loss
from meshwright.models.initial import Constant, initialize
from meshwright.models.llama import Llama
from meshwright.spec.model.architecture import LlamaArchitecture, RopeScaling
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS
from model_counts import num_active_matmul_parameters

GROUPED = LlamaArchitecture(
    vocab_size=97, dim=48, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, ffn_dim=80, max_seq_len=512
)
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64)
VARIANTS = {
    "grouped, projections not square": GROUPED,
    "one kv head": GROUPED.replace(num_kv_heads=1),
    "no groups, dim = heads x head_dim": GROUPED.replace(num_kv_heads=6, head_dim=8),
    "llama 3.1 rope": GROUPED.replace(rope_scaling=SCALING),
    "tied": GROUPED.replace(tie_embeddings=True),
    "other eps and theta": GROUPED.replace(norm_eps=1e-2, rope_theta=100.0),
    "qwen3": GROUPED.replace(qk_norm=True, rope_theta=1_000_000.0),
    "qwen2": GROUPED.replace(qkv_bias=True),
    "qwen3 tied": GROUPED.replace(qk_norm=True, tie_embeddings=True),
}

HF_NAMES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


def random_model(architecture: LlamaArchitecture) -> Llama:
    """Return a model none of whose weights is special: norms are not 1, and no matrix is small."""
    torch.manual_seed(0)
    model = Llama(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, GROUPED.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def hf_name(fqn: str) -> str:
    *parts, kind = fqn.split(".")
    if parts[0] != "blocks":
        return f"{HF_NAMES[parts[0]]}.{kind}"
    return f"model.layers.{parts[1]}.{HF_NAMES['.'.join(parts[2:])]}.{kind}"


def hf_model(model: Llama) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs meshwright[hf]")
    config = transformers.AutoConfig.for_model(**architecture_to_hf(model.architecture))
    peer = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    renamed = {hf_name(fqn): parameter for fqn, parameter in model.state_dict().items()}
    missing, unexpected = peer.load_state_dict(renamed, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.architecture.tie_embeddings else set())
    return peer


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str) -> None:
    model = random_model(VARIANTS[variant])
    peer = hf_model(model)
    tokens_BS = random_tokens(2, 300)
    with torch.no_grad():
        ours_BSV, theirs_BSV = model(tokens_BS), peer(tokens_BS).logits
    assert theirs_BSV.std() > 0.5, "a comparison of zeros would prove nothing"
    assert (ours_BSV - theirs_BSV).abs().max() < 1e-5 * theirs_BSV.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lengths", [[1] * 12, [7, 1, 1, 3], [12], [5, 7]])
def test_cache_gives_the_logits_of_the_whole(variant: str, lengths: list[int]) -> None:
    model = random_model(VARIANTS[variant])
    tokens_BS = random_tokens(3, 12)
    cache = KVCache(model.architecture.num_layers, max_len=20)
    with torch.no_grad():
        parts = [model(part_BS, cache=cache) for part_BS in tokens_BS.split(lengths, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens_BS), rtol=1e-5, atol=1e-5)
    assert cache.length == 12


def test_positions_can_be_given() -> None:
    model = random_model(GROUPED)
    tokens_BS = random_tokens(1, 16)
    shifted_BSV = model(tokens_BS, positions_S=torch.arange(5, 21))
    # RoPE turns by differences of positions: a common shift changes nothing, another order does.
    torch.testing.assert_close(shifted_BSV, model(tokens_BS), rtol=1e-4, atol=1e-4)
    assert (model(tokens_BS, positions_S=torch.arange(16).flip(0)) - shifted_BSV).abs().max() > 0.1


def test_a_token_sees_nothing_after_it() -> None:
    model = random_model(GROUPED)
    tokens_BS = random_tokens(1, 16)
    changed_BS = tokens_BS.clone()
    changed_BS[0, 10] = (changed_BS[0, 10] + 1) % GROUPED.vocab_size
    difference_BSV = (model(tokens_BS) - model(changed_BS)).abs()
    assert torch.equal(difference_BSV[0, :10], torch.zeros(10, GROUPED.vocab_size))
    assert difference_BSV[0, 10:].amax(-1).min() > 0


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_spec(name: str) -> None:
    with torch.device("meta"):
        model = build_architecture(PRESETS[name])
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == model_spec(PRESETS[name]).num_parameters
    others = {fqn for fqn in model.state_dict() if not fqn.endswith("router.bias")}
    assert others == set(parameters), "no other buffers, and a tied weight once"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_op_with_weights_names_its_module(variant: str) -> None:
    with torch.device("meta"):
        sizes: Counter[str] = Counter()
        for fqn, parameter in Llama(VARIANTS[variant]).named_parameters():
            sizes[fqn.rpartition(".")[0]] += parameter.numel()
    priced: dict[str, int] = {}
    for group in model_spec(VARIANTS[variant]).groups:
        for index in range(group.count):
            prefix = f"{group.name}.{index}." if group.name else ""
            priced |= {f"{prefix}{op.name}": op.num_parameters for op in group.ops if op.num_parameters}
    assert priced == sizes


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_an_initial_and_gets_a_gradient(variant: str) -> None:
    model = Llama(VARIANTS[variant])
    initialize(model, seed=0)
    tokens_BS = random_tokens(2, 16)
    next_token_loss(model(tokens_BS), tokens_BS).backward()
    for fqn, parameter in model.named_parameters():
        assert isinstance(model.initial(fqn), Constant) == ("norm" in fqn or fqn.endswith(".bias"))
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0, fqn


@pytest.mark.parametrize("name", ["llama-1m", "llama3.2-1b", "llama3-405b"])
def test_first_logits_spread_alike_at_any_width(name: str) -> None:
    # The last norm makes x of mean square 1, so the head alone sets the spread: no need to run the model.
    head = Llama.initial(_on_meta(name), "head.weight" if not PRESETS[name].tie_embeddings else "embedding.weight")
    assert not isinstance(head, Constant)
    assert head.std * PRESETS[name].dim ** 0.5 == pytest.approx(0.632, abs=0.001)


def _on_meta(name: str) -> Llama:
    with torch.device("meta"):
        return Llama(PRESETS[name].replace(num_layers=1))


def test_flops_are_those_that_torch_counts() -> None:
    batch_size, seq_len = 2, 64
    model = random_model(GROUPED)
    tokens_BS = random_tokens(batch_size, seq_len)
    # Unfused attention: torch 2.13 has no count for the fused one of the CPU. Its matmuls are the only batched ones.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(model(tokens_BS), tokens_BS).backward()
    counts = counter.get_flop_counts()["Global"]
    assert set(counts) == {torch.ops.aten.mm, torch.ops.aten.bmm}
    spec, num_tokens = model_spec(GROUPED), batch_size * seq_len
    matmul_flops = 6 * num_active_matmul_parameters(spec) * num_tokens
    assert counts[torch.ops.aten.mm] == matmul_flops
    # torch counts the whole square of pairs, the convention the half that the mask leaves.
    assert counts[torch.ops.aten.bmm] == 2 * (spec.flops_per_token(seq_len) * num_tokens - matmul_flops)
