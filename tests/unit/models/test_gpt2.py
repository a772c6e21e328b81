"""GPT2 against transformers, against itself with a cache, and against its ModelSpec."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hf_models import require_transformers, some_tokens, their_logits, write_run
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.maps.gpt2 import GPT2 as NAMES
from meshwright.checkpoint.hf.weights import load_hf_parameters
from meshwright.errors import ConfigError
from meshwright.inference.generate import Sampling, generate
from meshwright.inference.loaded_model import load_model
from meshwright.models.attention.causal_attention import KVCache
from meshwright.models.build import build_architecture
from meshwright.models.contract import next_token_loss
from meshwright.models.gpt2 import GPT2
from meshwright.models.initial import initialize
from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.model_spec import model_spec
from model_counts import num_active_matmul_parameters

SIZES = {"vocab_size": 264, "dim": 24, "num_layers": 2, "num_heads": 3, "num_kv_heads": 3, "head_dim": 8}
SMALL = GPT2Architecture.from_dict({**SIZES, "ffn_dim": 40, "max_seq_len": 64, "tie_embeddings": True})
UNTIED = SMALL.replace(tie_embeddings=False, norm_eps=1e-2)


def random_model(architecture: GPT2Architecture) -> GPT2:
    """Return a model none of whose weights is special: norms are not 1, biases not 0."""
    torch.manual_seed(0)
    model = GPT2(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.2)
    return model.eval()


def write_theirs(folder: Path, **options: Any) -> Any:
    """Write a folder of transformers' own GPT-2 with random weights, and return their model."""
    sizes = {"vocab_size": 264, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40, "n_positions": 64}
    transformers = require_transformers()
    config = transformers.GPT2Config(**{**sizes, **options})
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.2)
    model.eval().save_pretrained(folder)
    return model


def without_head(folder: Path) -> None:
    """Rewrite a folder as the published one is: no prefix, the causal masks stored, no head."""
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor.clone() for name, tensor in load_file(file).items()}
    tensors |= {f"h.{index}.attn.bias": torch.ones(1, 1, 64, 64).tril() for index in range(2)}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "options", [{}, {"n_inner": None}, {"tie_word_embeddings": False}, {"layer_norm_epsilon": 0.1}]
)
@pytest.mark.parametrize("is_published", [False, True])
def test_an_imported_model_computes_the_logits_of_transformers(
    tmp_path: Path, options: dict[str, Any], is_published: bool
) -> None:
    theirs = write_theirs(tmp_path / "theirs", **options)
    if is_published and "tie_word_embeddings" not in options:
        without_head(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = load_model(tmp_path / "run").model
    with torch.inference_mode():
        expected = theirs(some_tokens()).logits
        torch.testing.assert_close(ours(some_tokens()), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.5, "a comparison of zeros would prove nothing"


@pytest.mark.parametrize("architecture", [SMALL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 4_000])
def test_an_exported_model_computes_the_logits_of_ours(
    tmp_path: Path, architecture: GPT2Architecture, max_shard_bytes: int
) -> None:
    model = write_run(tmp_path / "run", architecture)
    exported = export(tmp_path / "run", tmp_path / "out", weights=ExportFormat(max_shard_bytes=max_shard_bytes))
    assert (exported.num_files > 3) == (max_shard_bytes == 4_000)
    torch.testing.assert_close(their_logits(tmp_path / "out", some_tokens()), model(some_tokens()), rtol=0, atol=1e-5)
    # Bit by bit the same, transposed and split once each way.
    weights = load_hf_parameters(tmp_path / "out", architecture)
    written = load_parameters(tmp_path / "run" / "checkpoints" / "step-3")
    assert set(weights) == set(written)
    assert all(torch.equal(weights[name], written[name]) for name in written)


def test_queries_keys_and_values_share_a_tensor_of_theirs() -> None:
    names = [f"blocks.7.attention.{part}.weight" for part in ("query", "key", "value")]
    assert [NAMES.theirs(name) for name in names] == [["transformer.h.7.attn.c_attn.weight"]] * 3


@pytest.mark.parametrize("lengths", [[1] * 12, [7, 1, 1, 3], [5, 7]])
def test_cache_gives_the_logits_of_the_whole(lengths: list[int]) -> None:
    model = random_model(SMALL)
    tokens_BS = some_tokens()[:, :12]
    cache = KVCache(SMALL.num_layers, max_len=20)
    with torch.no_grad():
        parts = [model(part_BS, cache=cache) for part_BS in tokens_BS.split(lengths, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens_BS), rtol=1e-5, atol=1e-5)


def test_positions_can_be_given() -> None:
    model = random_model(SMALL)
    tokens_BS = some_tokens()[:, :16]
    torch.testing.assert_close(model(tokens_BS, positions_S=torch.arange(16)), model(tokens_BS))
    assert (model(tokens_BS, positions_S=torch.arange(5, 21)) - model(tokens_BS)).abs().max() > 0.1


def test_a_token_sees_nothing_after_it() -> None:
    model = random_model(SMALL)
    tokens_BS = some_tokens()[:1, :16]
    changed_BS = tokens_BS.clone()
    changed_BS[0, 10] = (changed_BS[0, 10] + 1) % SMALL.vocab_size
    difference_BSV = (model(tokens_BS) - model(changed_BS)).abs()
    assert difference_BSV[0, :10].max() == 0
    assert difference_BSV[0, 10:].amax(-1).min() > 0


def test_more_positions_than_the_model_has_are_refused() -> None:
    prompt = some_tokens()[0].tolist()
    assert len(list(generate(random_model(SMALL), prompt, Sampling(max_new_tokens=16)))) == 16
    with pytest.raises(ConfigError, match="max_seq_len = 64"):
        generate(random_model(SMALL), prompt, Sampling(max_new_tokens=17))


@pytest.mark.parametrize("architecture", [SMALL, UNTIED], ids=["tied", "untied"])
def test_parameters_and_flops_are_those_of_the_spec(architecture: GPT2Architecture) -> None:
    with torch.device("meta"):
        model = build_architecture(architecture)
        tokens_BS = torch.zeros(1, 64, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            next_token_loss(model(tokens_BS), tokens_BS).backward()
    spec = model_spec(architecture)
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters
    attention = 3 * architecture.num_layers * 2 * architecture.num_heads * 2 * architecture.head_dim * 64
    matmuls = 6 * num_active_matmul_parameters(spec)
    # torch counts all pairs of tokens, the spec those that the mask leaves.
    assert spec.flops_per_token(64) == matmuls + attention // 2
    assert 64 * matmuls <= counter.get_total_flops() <= 64 * (matmuls + 2 * attention)


def test_the_first_loss_is_that_of_a_guess() -> None:
    model = GPT2(SMALL)
    initialize(model, 0)
    tokens: Tensor = some_tokens()
    assert abs(next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).item() - torch.tensor(264.0).log().item()) < 0.1


@pytest.mark.parametrize(
    "changes", [{"num_kv_heads": 1}, {"qk_norm": True}, {"sliding_window": 8}, {"qkv_bias": True}, {"dropout": 1.0}]
)
def test_what_gpt2_does_not_have_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        SMALL.replace(**changes)
