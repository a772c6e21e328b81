"""export against transformers itself: a mistake that export and import share would pass every round trip."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from full_disk import no_file_larger_than
from hf_models import (
    NARROW,
    SCALING,
    architecture,
    require_transformers,
    some_tokens,
    their_logits,
    write_hf,
    write_run,
)
from meshwright.checkpoint.checkpoint import load_parameters, save
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.torch_formats.dcp_export import export_dcp
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.spec.job.job import Job
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.run.run import Manifest, Run

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "square": {},
    "tied": {"tie_embeddings": True},
    "narrow, one key head": NARROW,
    "stretched rope": {"rope_scaling": SCALING.to_dict(), "rope_theta": 10_000.0},
    "mistral": {"sliding_window": 64, **NARROW},
    "mistral beyond its window": {"sliding_window": 7, **NARROW},
    "qwen3, a window in one layer": {
        **{"qk_norm": True, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
    },
    "qwen2": {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1e6},
    "qwen2, narrow and tied": {"qkv_bias": True, **NARROW, "tie_embeddings": True, "head_dim": 6},
    "qwen3": {"qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1e6},
    "qwen3, narrow and tied": {"qk_norm": True, **NARROW, "tie_embeddings": True},
}


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_transformers_computes_the_same_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write_run(tmp_path / "run", architecture(**changes))
    export(tmp_path / "run", tmp_path / "out")
    ours = model(some_tokens())
    assert ours.std() > 0.1
    torch.testing.assert_close(their_logits(tmp_path / "out", some_tokens()), ours, rtol=0, atol=1e-5)


def test_small_files_hold_the_same_model(tmp_path: Path) -> None:
    model = write_run(tmp_path / "run", architecture())
    exported = export(tmp_path / "run", tmp_path / "out", weights=ExportFormat(max_shard_bytes=20_000))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 6)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    loaded = {file.name: load_file(file) for file in files}
    assert index["weight_map"] == {key: name for name, tensors in loaded.items() for key in tensors}
    sizes = {name: sum(tensor.nbytes for tensor in tensors.values()) for name, tensors in loaded.items()}
    assert all(size <= 20_000 or len(loaded[name]) == 1 for name, size in sizes.items())
    assert index["metadata"]["total_size"] == sum(sizes.values()) == exported.num_bytes
    assert exported.num_files == len(files)
    assert exported.num_parameters * 4 == exported.num_bytes
    torch.testing.assert_close(their_logits(tmp_path / "out", some_tokens()), model(some_tokens()), rtol=0, atol=1e-5)


def test_bfloat16_is_the_rounded_model(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "out", weights=ExportFormat("bfloat16"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_parameters(Run(tmp_path / "run").checkpoint(3))["blocks.1.attention.key.weight"].bfloat16()
    assert torch.equal(tensors["model.layers.1.self_attn.k_proj.weight"], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    transformers = require_transformers()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [export, export_dcp])
def test_values_beyond_the_range_of_the_dtype_are_refused(tmp_path: Path, write: Callable[..., Any]) -> None:
    model = write_run(tmp_path / "run", architecture())
    state = {name: parameter.double() for name, parameter in model.named_parameters()}
    run = Run(tmp_path / "run")

    def written(value: float, tensor_dtype: torch.dtype, dtype: str) -> None:
        state["blocks.1.ffn.up.weight"][3, 4] = value
        shutil.rmtree(run.checkpoints)
        save(run.checkpoint(3), {"model": {k: v.to(tensor_dtype) for k, v in state.items()}}, {"step": 3})
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        option = {"weights": ExportFormat(dtype)} if write is export else {"dtype": dtype}
        write(run.folder, tmp_path / "out", **option)

    written(3.4e38, torch.float32, "float32")
    written(-3.38e38, torch.float32, "bfloat16")
    written(float("-inf"), torch.float32, "bfloat16")
    with pytest.raises(CheckpointError, match=r"up\.weight holds 3\.4e\+38, and bfloat16 ends at .* --dtype float32"):
        written(-3.4e38, torch.float32, "bfloat16")
    with pytest.raises(CheckpointError, match=r"blocks\.1\.ffn\.up\.weight holds 1e\+39, and float32 ends at 3\.403e"):
        written(1e39, torch.float64, "float32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["def f(x):\n    return x , 'ä€😀' !", "  two  spaces ", "\t\x00", ""])
def test_auto_tokenizer_encodes_as_ours(tmp_path: Path, text: str) -> None:
    write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "out")
    transformers = require_transformers()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text)["input_ids"] == list(text.encode())
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == 256
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (config.eos_token_id, config.bos_token_id) == (256, 256)


def test_the_tokenizer_of_the_job_goes_along(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    own = tmp_path / "own"
    own.mkdir()
    vocab = {"<end>": 0, "<unk>": 1, "a": 2, "b": 3, "ab": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b")], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(own / "tokenizer.json"))
    (own / "tokenizer_config.json").write_text('{"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}')
    write_run(tmp_path / "run", architecture(), data={"tokenizer": str(own / "tokenizer.json")})
    export(tmp_path / "run", tmp_path / "out")
    theirs = require_transformers().AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("abba")["input_ids"] == [4, 3, 2] == list(load_tokenizer(str(own)).encode("abba"))
    assert theirs.eos_token_id == json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0


def test_a_checkpoint_folder_and_a_step_name_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    export(tmp_path / "run" / "checkpoints" / "step-3", tmp_path / "a")
    export(tmp_path / "run", tmp_path / "b", step=3)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="has no checkpoint of step 4: it has 3"):
        export(tmp_path / "run", tmp_path / "c", step=4)
    with pytest.raises(ConfigError, match=r"--step 4 asks for another"):
        export(tmp_path / "run" / "checkpoints" / "step-3", tmp_path / "c", step=4)
    assert not (tmp_path / "c").exists()


def test_all_files_are_as_readable_as_each_other(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "out")
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    (tmp_path / "out").mkdir()
    with pytest.raises(
        ConfigError, match="out exists, and export replaces nothing without --overwrite: name a new folder"
    ):
        export(tmp_path / "run", tmp_path / "out")


def test_folders_that_are_no_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere: name a run folder"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds no manifest\.json, so it is no run folder"):
        export(tmp_path, tmp_path / "out")
    write_run(tmp_path / "run", architecture())
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="has no checkpoint yet: train on"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"there is no .*manifest\.json, which says what the model is"):
        export(tmp_path / "elsewhere" / "step-3", tmp_path / "out")


def test_a_class_without_a_table_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    run = Run(tmp_path / "run")
    (tmp_path / "without_table.py").write_text("from torch import nn\nclass Mine(nn.Linear): ...\n")
    section = {"source": "without_table:Mine", "options": {"in_features": 2, "out_features": 3}}
    manifest = Manifest(job=Job.from_dict({"model": section}), module_dir=str(tmp_path), seed=0, num_parameters=1)
    run.manifest.write_text(manifest.to_json())
    with pytest.raises(UnsupportedError, match=r"without_table:Mine has no attribute hugging_face, .*load_parameters"):
        export(run.folder, tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"the class without_table:Mine: .*load_parameters\(Path\('"):
        export_dcp(run.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("write", [export, export_dcp])
def test_damage_leaves_no_folder(tmp_path: Path, write: Callable[[Path, Path], object]) -> None:
    write_run(tmp_path / "run", architecture())
    path = Run(tmp_path / "run").checkpoint(3) / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000\.bin is damaged"):
        write(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_full_disk_leaves_no_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    said = r"could not be written .*File too large.*was removed"
    with no_file_larger_than(30_000), pytest.raises(CheckpointError, match=said):
        export(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_tokenizer_that_the_model_has_no_rows_for_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture(vocab_size=256))
    with pytest.raises(ConfigError, match=r"tokenizer of .* has 257 tokens, more than .*256"):
        export(tmp_path / "run", tmp_path / "out")


def test_data_of_the_users_own_has_no_tokenizer_to_export(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture(), data={"source": "my_module:MyData"})
    export(tmp_path / "run", tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_was_imported_goes_out_to_the_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    write_hf(tmp_path / "theirs", kind, dtype, max_shard_size="20KB", eos_token_id=[7, 9], bos_token_id=5)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    name = str(dtype).removeprefix("torch.")
    export(tmp_path / "run", tmp_path / "out", weights=ExportFormat("bfloat16" if name == "bfloat16" else "float32"))
    before = {k: v for file in (tmp_path / "theirs").glob("*.safetensors") for k, v in load_file(file).items()}
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype == dtype
        assert tensor.view(torch.uint8).equal(after[key].view(torch.uint8)), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == ([7, 9], 5)
    copied = tmp_path / "out" / "generation_config.json"
    assert copied.read_bytes() == (tmp_path / "theirs" / "generation_config.json").read_bytes()


def test_a_trained_run_may_be_moved_if_its_config_lies_in_it(tmp_path: Path) -> None:
    write_hf(tmp_path / "theirs", "llama")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    exported = export(tmp_path / "moved", tmp_path / "out")
    assert isinstance(exported.model.architecture, LlamaArchitecture)
