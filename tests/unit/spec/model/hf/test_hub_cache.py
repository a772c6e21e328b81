"""A hub id is found in the cache of huggingface_hub, without a network; else the message says how to get it."""

import json
from pathlib import Path

import pytest

from meshwright.app.job.job_problems import check_job
from meshwright.config.load import load_job
from meshwright.errors import ConfigError
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from meshwright.spec.model.hf.hub_cache import hub_cache, local_path
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.presets import PRESETS

HUB_ID = "some-lab/Tiny-1.5"


def write_snapshot(commit: str) -> Path:
    """Write the model into the cache as huggingface_hub lays it out."""
    snapshot = hub_cache() / "models--some-lab--Tiny-1.5" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    config = architecture_to_hf(PRESETS["llama-1m"])
    (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return snapshot


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_downloaded_model_is_found_by_its_id() -> None:
    snapshot = write_snapshot("0123abc")
    assert local_path(HUB_ID) == snapshot
    assert resolve_architecture(ModelSection(source=HUB_ID)) == PRESETS["llama-1m"]
    Path("job.toml").write_text(f'[model]\nsource = "{HUB_ID}"\ninitial_weights = "{HUB_ID}"', encoding="utf-8")
    resolved = load_job("job.toml")
    assert resolved.job.model.source == HUB_ID
    # The snapshot of this test has no weights.
    [problem] = check_job(resolved, 1)
    assert problem.startswith(f"job.toml: {snapshot} holds neither model.safetensors nor ")


def test_of_several_snapshots_it_is_that_of_main() -> None:
    newer = write_snapshot("b")
    write_snapshot("a")
    assert local_path(HUB_ID) == Path(HUB_ID)
    (newer.parents[1] / "refs").mkdir()
    (newer.parents[1] / "refs" / "main").write_text("b", encoding="utf-8")
    assert local_path(HUB_ID) == newer


def test_a_folder_of_that_name_is_the_folder() -> None:
    write_snapshot("0123abc")
    Path(HUB_ID).mkdir(parents=True)
    assert local_path(HUB_ID) == Path(HUB_ID)


def test_a_missing_model_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=f"`hf download {HUB_ID}` puts it into the cache .*/hf/hub"):
        resolve_architecture(ModelSection(source=HUB_ID))
    Path("job.toml").write_text(
        f'[model]\ninitial_weights = "{HUB_ID}"\n[data]\ntokenizer = "{HUB_ID}"', encoding="utf-8"
    )
    problems = check_job(load_job("job.toml"), 1)
    assert [f"`hf download {HUB_ID}`" in problem for problem in problems] == [True, True]


@pytest.mark.parametrize("name", ["texts/config.json", "/data/llama", "~/llama", "a/b/c", "llama-1m", "a/b.csv"])
def test_other_paths_are_no_ids(name: str) -> None:
    assert local_path(name) == Path(name).expanduser()
