"""The three verbs of a finished model, as a user calls them."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import meshwright as mw
from hf_models import architecture, require_transformers, write_hf, write_run
from meshwright.cli.main import run


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """A run folder."""
    write_run(tmp_path / "run", architecture())
    return str(tmp_path / "run")


def test_generate_repeats_with_a_seed(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "def ", "--max-new-tokens", "12", "--temperature", "1.5", "--top-k", "50"]
    texts = []
    for seed in ("0", "0", "1"):
        assert run(["generate", trained, *options, "--seed", seed]) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("def ")
        assert shown.out.endswith("\n")
        assert "step-3: 12 tokens, " in shown.err
        texts.append(shown.out)
    assert texts[0] == texts[1] != texts[2]


def test_generate_names_what_is_out_of_range(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", trained, "--top-p", "2"]) == 2
    assert "error: --top-p 2.0 must be above 0 and at most 1 (all tokens)" in capsys.readouterr().err
    assert run(["generate", trained, "--max-new-tokens", str(10**12)]) == 2
    assert "error: a KV cache of 1,000,000,000,00" in capsys.readouterr().err
    assert run(["generate", trained + "x"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_export_says_what_it_wrote_and_compares(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_transformers()
    assert run(["export", trained, str(tmp_path / "out"), "--dtype", "bfloat16", "--verify"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{trained}/checkpoints/step-3 -> {tmp_path}/out: 29.3k parameters in bfloat16, 57.3 KiB")
    assert second.startswith("logits equal those of transformers 5")
    assert float(second.partition(" within ")[2].split()[0]) < 1e-5
    assert run(["export", trained, str(tmp_path / "out")]) == 2
    assert "replaces nothing without --overwrite" in capsys.readouterr().err
    assert repr(mw.export(trained, tmp_path / "other")).startswith(f"<Export {trained}/checkpoints/step-3 -> ")


def test_check_reads_the_headers_of_initial_weights(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["export", trained, str(out)]) == 0
    (tmp_path / "a.txt").write_text("words " * 2000)
    job = tmp_path / "job.toml"
    text = f"[model]\nsource = '{out}'\ninitial_weights = '{out}'\n[data]\nsource = '{tmp_path / 'a.txt'}'\n"
    job.write_text(text)
    check = ["check", str(job)]
    assert run([*check, "data.tokenizer=bytes", "train.seq_len=64"]) == 0
    capsys.readouterr()
    assert run([*check, "model.options.num_layers=3"]) == 2
    assert "out' lacks model.layers.2.input_layernorm.weight, model.layers.2.mlp.down" in capsys.readouterr().err
    assert run([*check, "model.options.ffn_dim=64"]) == 2
    assert "layers.0.mlp.gate_proj.weight is [32, 32], the model has [64, 32]; " in capsys.readouterr().err
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:-5])
    assert run(check) == 2
    assert "model.safetensors cannot be read as safetensors" in capsys.readouterr().err


def test_other_logits_fail_the_check(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_transformers()
    monkeypatch.setattr("meshwright.app.conversion.exchange.max_logits_difference", lambda *_: 0.25)
    assert run(["export", trained, str(tmp_path / "out"), "--verify"]) == 70
    assert "off by up to 2.5e-01 where rounding explains 1e-03" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_weight_of_nan_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_transformers()
    write_hf(tmp_path / "theirs", "llama")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    tensors["lm_head.weight"][255] = float("nan")
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    assert run(["import", str(tmp_path / "theirs"), str(tmp_path / "run")]) == 0
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--verify"]) == 70
    shown = capsys.readouterr()
    assert "logits equal" not in shown.out
    assert "NaN or infinity is in head.weight (32 of its values)" in shown.err
    assert not (tmp_path / "out").exists()


def test_the_check_without_transformers_is_refused_before_anything_is_written(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(["export", trained, str(tmp_path / "out"), "--verify"]) == 2
    assert "needs the package transformers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_export_import_generate_is_the_same_text(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["export", trained, str(tmp_path / "out")]) == 0
    assert run(["import", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    said, then = capsys.readouterr().out.splitlines()[-2:]
    assert said.endswith("again/checkpoints/step-0: 29.3k parameters in float32")
    assert then.startswith("next: meshwright generate ")
    texts = []
    for source in (trained, str(tmp_path / "out"), str(tmp_path / "again")):
        assert run(["generate", source, "--prompt", "x = ", "--max-new-tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]

    tokenizer = (tmp_path / "out" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert run(["import", str(tmp_path / "out"), str(tmp_path / "mute")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: meshwright train ")
    assert run(["generate", str(tmp_path / "mute")]) == 2
    assert f"put the model's tokenizer.json into {tmp_path / 'mute'}\n" in capsys.readouterr().err
    tokenizer.rename(tmp_path / "out" / "tokenizer.json")

    # The same folder where huggingface_hub would have put it, named by its id.
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    snapshots = tmp_path / "hf" / "hub" / "models--lab--tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    (tmp_path / "out").rename(snapshots / "0123abc")
    assert run(["generate", "lab/tiny", "--prompt", "x = ", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == texts[0]
    assert run(["import", "lab/tiny", str(tmp_path / "by-id")]) == 0
    for command in (["generate", "lab/other"], ["import", "lab/other", str(tmp_path / "other")]):
        assert run(command) == 2
        assert "`hf download lab/other`" in capsys.readouterr().err


def test_import_of_nothing_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(tmp_path / "nowhere"), str(tmp_path / "run")]) == 2
    assert "config.json: name the folder of a Hugging Face model" in capsys.readouterr().err


def test_export_to_dcp_and_back_is_the_same_text(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert run(["export", trained, out, "--format", "dcp", "--verify"]) == 2
    assert "--verify compares with transformers" in capsys.readouterr().err
    assert run(["export", trained, out, "--format", "dcp"]) == 0
    assert run(["export", trained, out, "--format", "dcp", "--overwrite"]) == 0
    assert run(["import", out, str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("then set model.initial_weights to HF_FOLDER")
    assert run(["import", out, str(tmp_path / "again"), "--overwrite", "--json"]) == 0
    assert '"dropped": {}' in capsys.readouterr().out
    texts = []
    for source in (trained, str(tmp_path / "again")):
        assert run(["generate", source, "--prompt", "x = ", "--max-new-tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
