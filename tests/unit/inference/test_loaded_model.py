"""load_model: the same model from a run, a checkpoint and a folder; prompts begin and end as the model expects."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_models import architecture, some_tokens, write_hf, write_run
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.errors import CheckpointError, ConfigError
from meshwright.inference.loaded_model import LoadedModel, load_model

CPU = torch.device("cpu")


def write_template_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json that puts <s> before every text, as Llama's does."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, **{chr(97 + i): 3 + i for i in range(26)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def logits(loaded: LoadedModel) -> Any:
    with torch.inference_mode():
        return loaded.model(some_tokens())


def test_run_checkpoint_and_exported_folder_hold_the_same_model(tmp_path: Path) -> None:
    model = write_run(tmp_path / "run", architecture(tie_embeddings=True))
    export(tmp_path / "run", tmp_path / "out", weights=ExportFormat(max_shard_bytes=30_000))
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-3", tmp_path / "out"):
        loaded = load_model(source, device=CPU)
        assert torch.equal(logits(loaded), model(some_tokens()))
        assert loaded.encode_prompt("hi") == [104, 105]
        assert loaded.stop == {256}
    assert load_model(tmp_path / "run", 3, CPU).origin.name == "step-3"


def test_an_empty_prompt_begins_a_text(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    assert load_model(tmp_path / "run", device=CPU).encode_prompt("") == [256]


def test_a_foreign_models_prompt_begins_as_its_tokenizer_says(tmp_path: Path) -> None:
    write_hf(tmp_path / "theirs", "llama", eos_token_id=[7, 9], bos_token_id=0)
    write_template_tokenizer(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    for source in (tmp_path / "theirs", tmp_path / "run"):
        loaded = load_model(source, device=CPU)
        assert loaded.encode_prompt("ab") == [0, 3, 4]
        assert loaded.encode_prompt("") == [0]
        assert loaded.stop == {7, 9}


def test_the_configs_end_counts_where_there_is_no_generation_config(tmp_path: Path) -> None:
    write_hf(tmp_path / "theirs", "llama", eos_token_id=7)
    write_template_tokenizer(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").unlink()
    assert load_model(tmp_path / "theirs", device=CPU).stop == {7}


def test_a_folder_without_tokenizer_says_so_when_text_comes(tmp_path: Path) -> None:
    write_hf(tmp_path / "theirs", "llama")
    loaded = load_model(tmp_path / "theirs", device=CPU)
    with pytest.raises(ConfigError, match=r"has no tokenizer: put the model's tokenizer\.json into .*theirs$"):
        loaded.encode_prompt("hi")


def test_data_of_the_users_own_has_no_known_tokenizer(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture(), data={"source": "my_module:MyData"})
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_model(tmp_path / "run", device=CPU).encode_prompt("hi")


def test_other_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no manifest\.json, so it is no run folder"):
        load_model(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is the folder of an adapter, without its base: name the run .* --merge"):
        load_model(tmp_path / "adapter")
    write_hf(tmp_path / "theirs", "llama")
    with pytest.raises(ConfigError, match="is a Hugging Face folder, which has no steps: omit --step 3"):
        load_model(tmp_path / "theirs", 3)
    shutil.rmtree(tmp_path / "theirs")
    write_run(tmp_path / "run", architecture())
    (tmp_path / "run" / "checkpoints" / "step-3" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no checkpoint\.json"):
        load_model(tmp_path / "run")
