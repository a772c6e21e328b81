"""[model] of a job becomes an architecture, or one clear error."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import MoEArchitecture, YarnScaling
from meshwright.spec.model.presets import PRESETS


def resolve(source: str, **options: Any) -> Any:
    return resolve_architecture(ModelSection(source=source, options=options))


def test_preset_with_options_on_top() -> None:
    assert resolve("llama-1m", num_layers=2) == PRESETS["llama-1m"].replace(num_layers=2)


def test_options_may_hold_a_table() -> None:
    assert resolve("llama-1m", rope_scaling={"factor": 8.0}).rope_scaling.factor == 8.0


def test_options_change_fields_of_a_part_and_leave_the_others() -> None:
    changed = resolve("mla-moe-4m", router={"balance_loss": 0.1}, latent={"kv_rank": 32}, yarn={"factor": 2.0})
    before = PRESETS["mla-moe-4m"]
    assert isinstance(before, MoEArchitecture)
    assert before.latent is not None
    assert changed.router == before.router.replace(balance_loss=0.1)
    assert changed.latent == before.latent.replace(kv_rank=32)
    assert changed.yarn == YarnScaling(factor=2.0)


@pytest.mark.parametrize("source", ["my_module:MyModel", "package.module:Name"])
def test_own_class_has_no_architecture(source: str) -> None:
    assert resolve(source, anything=1) is None


def test_config_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(architecture_to_hf(PRESETS["qwen3-8b"])))
    assert resolve(str(tmp_path)) == PRESETS["qwen3-8b"]
    assert resolve(str(tmp_path / "config.json"), num_layers=3).num_layers == 3


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        ("llama3-7b", {}, "did you mean llama3-8b"),
        ("LLAMA-1M", {}, "did you mean llama-1m"),
        ("nowhere/config.json", {}, "there is no file nowhere/config.json"),
        ("llama-1m", {"n_layers": 2}, "did you mean num_layers"),
        ("llama-1m", {"hidden_dim": 2}, "head_dim|dim"),
        (
            "llama-1m",
            {"dim": "wide"},
            "model.options.dim = 'wide' must be a whole number, 1 or more: change it, or leave",
        ),
        ("llama-1m", {"num_layers": 0}, "model.options.num_layers = 0 must be a whole number, 1 or more"),
        ("llama3.1-8b", {"rope_scaling": {"factor": 0.5}}, "rope_scaling.factor = 0.5 must be a number, 1 or more"),
        ("llama-1m", {"num_kv_heads": 3}, "set num_kv_heads to 2 or 4"),
        ("moe-4m", {"expert_per_token": 2}, "did you mean experts_per_token"),
        ("moe-4m", {"router": {"blance_loss": 0.1}}, r"model\.options\.router\.blance_loss"),
        ("moe-4m", {"experts_per_token": 9}, "more than num_experts = 8: set it to 8"),
        ("llama-1m", {"rope_scaling": {"low_freq_factor": 1.0}}, "model.options.rope_scaling.factor is missing"),
    ],
)
def test_mistakes_name_what_was_meant(source: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(source, **options)


def test_every_unknown_option_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="num_layers") as raised:
        resolve("llama-1m", n_layers=2, n_heads=2)
    assert len(str(raised.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "told"), [("{", "is no JSON"), ("[1]", "an object was expected"), ("\xff", "no JSON")]
)
def test_broken_file(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=told):
        resolve(str(file))


def test_foreign_model_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedError, match=r"config\.json has model_type = 'mamba'"):
        resolve(str(file))
