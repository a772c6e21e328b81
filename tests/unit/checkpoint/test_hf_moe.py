"""Mixtral, Qwen3-MoE and DeepSeek-V3 against transformers: logits, choices of experts, and folders both ways."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_models import moe_architecture, require_transformers, some_tokens, their_logits, write_hf, write_run
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.side_files import keep_side_files
from meshwright.checkpoint.hf.weights import load_hf_parameters
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.inference.generate import Sampling, generate
from meshwright.inference.loaded_model import load_model
from meshwright.inference.transformers_parity import max_logits_difference
from meshwright.models.attention.causal_attention import KVCache
from meshwright.models.moe import MixtureOfExperts
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_from_hf
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.run.run import Manifest, Run

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}
# The token counts are those of theirs: 48 tokens lie beyond the length before the stretch.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, yarn, tied": ("mixtral", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3_moe", {"head_dim": 12, "num_key_value_heads": 1}),
    "qwen3, dense layer, not normalised": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss, window in one layer, tied": (
        "gpt_oss",
        {
            **{"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            **{"swiglu_limit": 0.5, "tie_word_embeddings": True, "rope_parameters": YARN},
        },
    ),
    "deepseek": ("deepseek_v3", {}),
    "deepseek, yarn": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale_all_dim": 0.7}}),
    "deepseek, direct queries": ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek, direct queries, yarn": ("deepseek_v3", {"q_lora_rank": None, "rope_parameters": YARN}),
    "deepseek, one group, not interleaved": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
}
OURS: dict[str, LlamaArchitecture] = {
    "mixtral": moe_architecture(),
    "qwen3": moe_architecture(qk_norm=True, num_dense_layers=1, router={"normalize_weights": False}),
    "gpt-oss": PRESETS["gpt-oss-4m"].replace(sliding_window=7, swiglu_limit=0.5),
    "gpt-oss, full attention first": PRESETS["gpt-oss-4m"].replace(
        layer_types=["full_attention", "full_attention", "sliding_attention"], tie_embeddings=True
    ),
    "deepseek": PRESETS["mla-moe-4m"],
    "deepseek, yarn": PRESETS["mla-moe-4m"].replace(
        yarn={"factor": 8.0, "mscale_all_dim": 1.0, "original_max_seq_len": 16}
    ),
}


def chosen_by(model: nn.Module, routers: type[nn.Module], index: int) -> list[Tensor]:
    """Return a list that the next forward fills with expert_TK of every router, each token's in ascending order."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, routers):
            module.register_forward_hook(lambda _, __, output: found.append(output[index].sort(-1).values))
    return found


@pytest.mark.parametrize(("kind", "options"), MODELS.values(), ids=MODELS.keys())
def test_logits_and_choices_are_those_of_transformers(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    theirs = write_hf(tmp_path / "theirs", kind, **options)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = load_model(tmp_path / "run", device=CPU).model
    routers = {type(module) for module in theirs.modules() if "Router" in type(module).__name__}
    expected = chosen_by(theirs, *routers, index=2)
    chosen = chosen_by(ours, type(next(m for m in ours.modules() if isinstance(m, MixtureOfExperts)).router), index=0)
    with torch.inference_mode():
        expected_BSV = theirs(some_tokens()).logits
        logits_BSV = ours(some_tokens())
        assert expected_BSV.std() > 0.1
        torch.testing.assert_close(logits_BSV, expected_BSV, rtol=0, atol=1e-5)
        assert len(chosen) == len(expected) > 0
        assert all(torch.equal(one, other) for one, other in zip(chosen, expected, strict=True))
        directly = load_model(tmp_path / "theirs", device=CPU).model
        assert torch.equal(directly(some_tokens()), logits_BSV)


@pytest.mark.parametrize("name", OURS)
def test_transformers_computes_the_same_from_an_export(tmp_path: Path, name: str) -> None:
    model = write_run(tmp_path / "run", OURS[name])
    export(tmp_path / "run", tmp_path / "out", weights=ExportFormat(max_shard_bytes=200_000))
    with torch.inference_mode():
        logits_BSV = model(some_tokens())
    assert logits_BSV.std() > 0.1
    torch.testing.assert_close(their_logits(tmp_path / "out", some_tokens()), logits_BSV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek"])
def test_an_export_can_be_checked_in_bfloat16(tmp_path: Path, name: str) -> None:
    require_transformers()
    model = write_run(tmp_path / "run", OURS[name])
    export(tmp_path / "run", tmp_path / "out", weights=ExportFormat("bfloat16"))
    assert max_logits_difference(model, tmp_path / "out", torch.bfloat16) < 1e-5


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_what_was_imported_goes_out_to_the_bit(tmp_path: Path, kind: str) -> None:
    write_hf(tmp_path / "theirs", kind)
    imported = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert imported.num_parameters == sum(
        tensor.numel()
        for name, tensor in load_parameters(imported.run.checkpoint(0)).items()
        if not name.startswith("buffer.")
    )
    export(tmp_path / "run", tmp_path / "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "out")]
    assert architecture_from_hf(configs[0]) == architecture_from_hf(configs[1]) == imported.architecture


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        # Without rope_scaling transformers takes yarn for this family, and without a window it fails.
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, "yarn"),
        ({"layer_types": ["full_attention"] * 2}, "sliding_window"),
    ],
)
def test_gpt_oss_without_yarn_or_window_stays_so(tmp_path: Path, options: dict[str, Any], absent: str) -> None:
    theirs = write_hf(tmp_path / "theirs", "gpt_oss", **options)
    imported = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert getattr(imported.architecture, absent) is None
    export(tmp_path / "run", tmp_path / "out")
    with torch.inference_mode():
        expected_BSV = theirs(some_tokens()).logits
    torch.testing.assert_close(their_logits(tmp_path / "out", some_tokens()), expected_BSV, rtol=0, atol=0)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path / "theirs", "mixtral")
    with pytest.raises(ConfigError, match=r"6 missing: .*experts\.6\.w1\.weight"):
        load_hf_parameters(tmp_path / "theirs", moe_architecture(num_experts=7))


def test_what_sizes_do_not_show_is_remarked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_hf(tmp_path / "theirs", "mixtral")
    theirs = architecture_from_hf(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    assert isinstance(theirs, MoEArchitecture)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        load_hf_parameters(tmp_path / "theirs", theirs.replace(router=theirs.router.replace(balance_loss=0.1)))
        assert not caplog.records
        router = theirs.router.replace(normalize_weights=False)
        load_hf_parameters(tmp_path / "theirs", theirs.replace(experts_per_token=3, router=router))
    assert "trained with experts_per_token = 2, the model has 3" in caplog.text
    assert "trained with router.normalize_weights = True, the model has False" in caplog.text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_shared_experts": 1}, "Mixtral comes nearest, but does not have num_shared_experts = 1"),
        ({"router": {"bias_update_rate": 0.1}}, r"router\.bias_update_rate = 0\.1"),
        ({"router": {"num_groups": 2}}, r"router\.groups_per_token = 1"),
        ({"router": {"score": "sigmoid"}, "qk_norm": True}, r"Qwen3Moe .* router\.score = sigmoid"),
    ],
)
def test_a_mixture_that_transformers_lacks_trains_but_is_not_exported(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    model = moe_architecture(**changes)
    ours = write_run(tmp_path / "run", model)
    run = Run(tmp_path / "run")
    with pytest.raises(UnsupportedError, match=told):
        export(tmp_path / "run", tmp_path / "out")
    loaded = load_model(tmp_path / "run", device=CPU)
    keep_side_files(loaded_job(run), run)
    assert not (tmp_path / "run" / "config.json").exists()
    with torch.inference_mode():
        assert torch.equal(loaded.model(some_tokens()), ours(some_tokens()))


def loaded_job(run: Run) -> Any:
    job = Manifest.from_json(run.manifest.read_text()).job
    assert isinstance(resolve_architecture(job.model), MoEArchitecture)
    return job


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "deepseek, yarn"])
def test_generation_continues_as_the_whole_would(tmp_path: Path, name: str) -> None:
    model = write_run(tmp_path / "run", OURS[name])
    prompt = some_tokens()[0, :20].tolist()
    ids = list(generate(model, prompt, Sampling(temperature=0.0, max_new_tokens=8)))
    with torch.inference_mode():
        expected: list[int] = []
        for _ in range(8):
            expected.append(int(model(torch.tensor([prompt + expected]))[0, -1].argmax()))
        cache = KVCache(model.architecture.num_layers, max_len=48)
        parts = [model(part_BS, cache=cache) for part_BS in some_tokens().split([30, 1, 17], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(some_tokens()), rtol=1e-5, atol=1e-5)
    assert ids == expected
