"""load_hf_parameters and import_folder: what transformers wrote means the same here, or is refused by name."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import NARROW, architecture, some_tokens, write_hf
from meshwright.checkpoint.checkpoint import load, load_parameters, read_metadata
from meshwright.checkpoint.hf.export import export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.weights import load_hf_parameters
from meshwright.checkpoint.torch_formats.dcp_export import export_dcp
from meshwright.config.load import load_job
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.inference.loaded_model import build_with, load_model
from meshwright.spec.model.hf.hf_config import architecture_from_hf
from meshwright.spec.run.run import Manifest, Run

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 32, "rope_theta": 10_000.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "square": ("llama", {}),
    "tied, several files": ("llama", {"tie_word_embeddings": True, "max_shard_size": "20KB"}),
    "stretched rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1, "head_dim": 12}),
    "mistral": ("mistral", {"num_key_value_heads": 1, "sliding_window": 64}),
    "mistral beyond its window": ("mistral", {"sliding_window": 7}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2, a window in one layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of a small Llama in several files."""
    write_hf(tmp_path / "theirs", "llama", max_shard_size="20KB")
    return tmp_path / "theirs"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change, add or (None) remove tensors of the folder, which then has one file; "__" in names is "."."""
    tensors = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    for path in folder.glob("model*"):
        path.unlink()
    for name, value in changes.items():
        key = name.replace("__", ".")
        tensors = {k: v for k, v in tensors.items() if k != key} | ({} if value is None else {key: value})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("kind", "options"), MODELS.values(), ids=MODELS.keys())
def test_the_logits_are_those_of_transformers(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    model = write_hf(tmp_path / "theirs", kind, **options)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    with torch.inference_mode():
        expected = model(some_tokens()).logits
        assert expected.std() > 0.1
        for source in (tmp_path / "run", tmp_path / "theirs"):
            logits = load_model(source, device=torch.device("cpu")).model(some_tokens())
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_parameters_are_read_one_by_one_in_the_dtype_asked_for(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "theirs", "llama", torch.bfloat16)
    weights = load_hf_parameters(tmp_path / "theirs", architecture(), ["norm.weight", "blocks.1.ffn.up.weight"])
    assert list(weights) == ["norm.weight", "blocks.1.ffn.up.weight"]
    up = weights["blocks.1.ffn.up.weight"]
    assert up.dtype == torch.float32
    assert torch.equal(up, model.model.layers[1].mlp.up_proj.weight.float())
    with pytest.raises(KeyError):
        weights["head.weight"]
    everything = load_hf_parameters(tmp_path / "theirs", architecture(), dtype=None)
    assert everything["norm.weight"].dtype == torch.bfloat16
    build_with(architecture(), everything, torch.device("cpu"))


def test_an_imported_run_is_a_run(theirs: Path, tmp_path: Path) -> None:
    imported = import_folder(theirs, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.checkpoint_steps() == [0]
    metadata = read_metadata(run.checkpoint(0))
    assert (metadata["step"], metadata["imported_from"]) == (0, str(theirs))
    manifest = Manifest.from_json(run.manifest.read_text())
    assert manifest.job.model.initial_weights == str(theirs)
    assert manifest.num_parameters == imported.num_parameters
    assert imported.num_parameters == sum(t.numel() for t in load_parameters(run.checkpoint(0)).values())
    assert load_job(run.job).job == manifest.job
    assert (run.folder / "config.json").read_bytes() == (theirs / "config.json").read_bytes()
    assert imported.architecture == architecture_from_hf(json.loads((theirs / "config.json").read_text()))


def test_an_imported_run_is_not_resumed(theirs: Path, tmp_path: Path) -> None:
    import_folder(theirs, tmp_path / "run")
    state = {"model": load_parameters(Run(tmp_path / "run").checkpoint(0)), "optimizer": {"a": torch.zeros(1)}}
    with pytest.raises(CheckpointError, match=r"holds model but no optimizer.*with model\.initial_weights"):
        load(Run(tmp_path / "run").checkpoint(0), state)


def test_an_existing_run_folder_is_not_touched(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="run exists, and import replaces nothing"):
        import_folder(theirs, tmp_path / "run")


def test_a_missing_file_of_several_is_named(theirs: Path, tmp_path: Path) -> None:
    (theirs / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks model-00002-of-00005\.safetensors, which holds \d+ of its 21 tensors: copy"
    ):
        import_folder(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_index_that_promises_too_much_is_named(theirs: Path) -> None:
    shutil.copyfile(theirs / "model-00003-of-00005.safetensors", theirs / "model-00002-of-00005.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00005\.safetensors lacks .*, which model\.safe"):
        load_hf_parameters(theirs, architecture())


def test_a_truncated_file_is_named(theirs: Path) -> None:
    path = theirs / "model-00004-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00004-of-00005\.safetensors cannot be read as safetensors"):
        load_hf_parameters(theirs, architecture())


def test_unknown_and_missing_keys_are_listed(theirs: Path) -> None:
    bias = "model__layers__0__self_attn__q_proj__bias"
    rewrite(theirs, **{bias: torch.zeros(32), "model__norm__weight": None})
    with pytest.raises(
        ConfigError,
        match=r"1 unknown: model\.layers\.0\.self_attn\.q_proj\.bias; 1 missing: model\.norm\.weight",
    ):
        load_hf_parameters(theirs, architecture())


def test_keys_that_carry_nothing_are_dropped_by_name(theirs: Path) -> None:
    rewrite(theirs, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert "norm.weight" in load_hf_parameters(theirs, architecture())


def test_other_sizes_are_listed(theirs: Path) -> None:
    with pytest.raises(ConfigError, match=r"q_proj\.weight is \[32, 32\], the architecture has \[40, 24\].* more:"):
        load_hf_parameters(theirs, architecture(**NARROW))


def test_a_tied_model_may_store_its_head_if_it_is_the_embedding(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    model = write_hf(folder, "llama", tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.detach()
    rewrite(folder, lm_head__weight=embedding.clone())
    assert "head.weight" not in load_hf_parameters(folder, architecture(tie_embeddings=True))
    rewrite(folder, lm_head__weight=embedding + 1)
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_hf_parameters(folder, architecture(tie_embeddings=True))


def test_quantised_weights_are_refused(theirs: Path) -> None:
    rewrite(theirs, model__norm__weight=torch.ones(32).to(torch.float8_e4m3fn))
    with pytest.raises(UnsupportedError, match=r"holds model\.norm\.weight as F8_E4M3, but only F64, F32, BF16, F16"):
        load_hf_parameters(theirs, architecture())


def test_folders_without_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: name the folder of a Hugging Face model"):
        import_folder(tmp_path, tmp_path / "run")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor .*pytorch_model\.bin is a pickle"):
        load_hf_parameters(tmp_path, architecture())


def test_what_sizes_do_not_show_is_remarked(theirs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        load_hf_parameters(theirs, architecture(rope_theta=10_000.0, norm_eps=1e-6))
        assert not caplog.records
        load_hf_parameters(theirs, architecture(rope_theta=20_000.0, norm_eps=1e-6))
    assert "the weights were trained with rope_theta = 10000.0, the model has 20000.0" in caplog.text


def test_a_copy_of_the_config_counts_in_place_of_the_own(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((theirs / "config.json").read_text())
    (tmp_path / "copy.json").write_text(json.dumps(config))
    (tmp_path / "copies").mkdir()
    shutil.copy(tmp_path / "copy.json", tmp_path / "copies" / "config.json")
    (theirs / "generation_config.json").write_text("{}")
    (theirs / "config.json").write_text(json.dumps({**config, "use_blocks": True}))
    with pytest.raises(UnsupportedError, match=r"config\.json has use_blocks, of which"):
        import_folder(theirs, tmp_path / "run")
    for i, copy in enumerate(("copy.json", "copies")):
        imported = import_folder(theirs, tmp_path / f"run-{i}", config=tmp_path / copy)
        assert json.loads((imported.run.folder / "config.json").read_text()) == config
        assert (imported.run.folder / "generation_config.json").read_text() == "{}"
    assert "trained with use_blocks = True, the model has nothing of that name" in caplog.text


def test_weights_that_are_not_finite_are_remarked(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = torch.ones(264, 32)
    wrong[3, 1] = float("nan")
    rewrite(theirs, model__embed_tokens__weight=wrong, model__norm__weight=torch.full((32,), float("inf")))
    import_folder(theirs, tmp_path / "run")
    assert len(caplog.records) == 1
    assert "holds NaN or infinity in 2 tensors, the first is model.embed_tokens.weight: a loss" in caplog.text


def test_a_tokenizer_that_is_not_read_is_remarked(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (theirs / "vocab.json").write_text("{}")
    (theirs / "merges.txt").write_text("")
    import_folder(theirs, tmp_path / "run")
    [imported] = caplog.messages
    assert "theirs has vocab.json and merges.txt and no tokenizer.json, so the run's data.tokenizer is" in imported
    assert f"AutoTokenizer.from_pretrained('{theirs}').save_pretrained('{theirs}')` of transformers" in imported
    caplog.clear()
    export(tmp_path / "run", tmp_path / "out")
    [exported] = caplog.messages
    assert "run has no tokenizer.json, so the export has no tokenizer: `AutoTokenizer" in exported


def test_other_weights_next_to_the_model_are_named(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json", "pytorch_model.bin", "training_args.bin"):
        (theirs / name).write_text("")
    import_folder(theirs, tmp_path / "run")
    [message] = caplog.messages
    names = "adapter_config.json, adapter_model.safetensors, pytorch_model.bin"
    assert f"theirs also holds {names}, which is not read: only model*.safetensors are" in message


def test_an_export_says_that_it_rounds_float64(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_hf(tmp_path / "theirs", "llama", dtype=torch.float64)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    caplog.clear()
    export(tmp_path / "run", tmp_path / "out")
    export_dcp(tmp_path / "run", tmp_path / "dcp")
    said = [message for message in caplog.messages if "tensors in float64, the first is" in message]
    assert len(said) == 2
    assert all(message.endswith(": the export rounds them") for message in said)


def test_what_no_export_can_describe_is_not_imported(tmp_path: Path) -> None:
    write_hf(tmp_path / "theirs", "deepseek_v3", n_group=8, topk_group=4)
    with pytest.raises(UnsupportedError, match=r"model with router\.num_groups = 8, which no export can"):
        import_folder(tmp_path / "theirs", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_config_that_was_edited_after_the_import_is_refused(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", "llama")
    import_folder(tmp_path / "hf", tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.5}))
    with pytest.raises(CheckpointError, match=r"trained as another model than .*: norm_eps was .*, is 0\.5"):
        export(tmp_path / "run", tmp_path / "out")
