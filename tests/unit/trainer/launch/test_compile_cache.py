"""A compile cache that is stale or damaged is reported in one line and not read; one that fits is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.compile_cache import CacheKey, cache_folder, load_cache
from meshwright.trainer.launch.ranks import Ranks

RANKS = Ranks(0, 1, torch.device("cpu"))


def job(**layout: object) -> Job:
    return Job.from_dict({"model": {"source": "llama-1m"}, "layout": {"compile": True, **layout}})


def write(folder: Path, key: CacheKey) -> None:
    """Write a cache of one file, whose hash is another's."""
    folder.mkdir()
    (folder / "rank-0.bin").write_bytes(b"kernels")
    index = {"key": key._asdict(), "files": [{"name": "rank-0.bin", "bytes": 7, "sha256": "0"}]}
    (folder / "cache.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"torch": "2.11.0"}, "it was made for torch 2.11.0, and this is "),
        ({"device": "H100"}, "it was made for device H100, and this is "),
        ({"code": "0"}, "it was made for other code of Meshwright"),
        ({"job": "0"}, "it was made for another job or layout"),
        ({}, "rank-0.bin is damaged"),
    ],
)
def test_what_does_not_fit_is_ignored_in_one_line(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    run = Run(tmp_path)
    write(run.compile_cache, CacheKey.of(job(), RANKS)._replace(**changes))
    line = load_cache(job(), run, RANKS)
    assert line is not None
    assert line.startswith(f"compile cache {run.compile_cache} ignored: {reason}")
    assert "\n" not in line


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {}}', '{"key": null, "files": []}'])
def test_an_index_that_is_no_index_is_ignored(tmp_path: Path, text: str) -> None:
    run = Run(tmp_path)
    run.compile_cache.mkdir()
    (run.compile_cache / "cache.json").write_text(text)
    line = f"compile cache {run.compile_cache} ignored: cache.json is damaged; `meshwright precompile` writes it again"
    assert load_cache(job(), run, RANKS) == line


def test_a_cache_that_a_job_names_is_missed_and_one_that_it_does_not_is_not(tmp_path: Path) -> None:
    named = job(compile_cache=str(tmp_path / "cache"))
    assert cache_folder(named, Run(tmp_path)) == tmp_path / "cache"
    assert "does not exist" in (load_cache(named, Run(tmp_path), RANKS) or "")
    assert load_cache(job(), Run(tmp_path), RANKS) is None


def test_another_job_layout_or_length_is_another_key() -> None:
    key = CacheKey.of(job(), RANKS)
    assert CacheKey.of(job(compile_cache="elsewhere"), RANKS) == key
    for other in (job(activation_checkpoint="full"), job().replace(train=job().train.replace(seq_len=128))):
        difference = key.difference(CacheKey.of(other, RANKS))
        assert difference is not None
        assert "another job or layout" in difference
