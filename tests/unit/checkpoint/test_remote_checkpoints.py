"""Copies of checkpoints at a URL: never incomplete, continued after a crash, pruned, and fetched verified."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.checkpoint import load_parameters, save
from meshwright.checkpoint.remote import upload as uploading
from meshwright.checkpoint.remote.fetch import fetch_newest
from meshwright.checkpoint.remote.remote_store import RemoteStore
from meshwright.checkpoint.remote.upload import prune_remote, upload
from meshwright.errors import CheckpointError, ConfigError, DamagedCheckpoint
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run
from s3_server import s3_server


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((64, 8), value), "b": torch.arange(5.0)}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with checkpoints after steps 10 and 20."""
    run = Run(tmp_path / "run")
    for step in (10, 20):
        save(run.checkpoint(step), state(step), {"step": step, "validation_loss": 30.0 - step})
    run.manifest.write_text("{}")
    return run


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteStore]:
    """An empty store of each kind."""
    if request.param == "s3":
        with s3_server() as (bucket, environment):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            yield RemoteStore(f"s3://{bucket}/runs/first")
            gc.collect()
        return
    url = f"file://{tmp_path}/remote" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    yield RemoteStore(url)


class Interrupted(Exception):
    """Stands for a crash of the uploading process."""


def test_what_is_fetched_is_what_was_uploaded(store: RemoteStore, run: Run, tmp_path: Path) -> None:
    store.require_writable()
    assert store.steps() == []
    upload(store, run, 10)
    assert upload(store, run, 20) == sum(path.stat().st_size for path in run.checkpoint(20).iterdir())
    assert upload(store, run, 20) == 0
    assert store.steps() == [10, 20]
    other = Run(tmp_path / "other")
    assert fetch_newest(store, other) == 20
    assert other.checkpoint_steps() == [20]
    assert other.manifest.read_text() == "{}"
    assert torch.equal(load_parameters(other.checkpoint(20))["w"], torch.full((64, 8), 20.0))
    assert [path.name for path in other.checkpoints.iterdir()] == ["step-20"]


def test_an_interrupted_upload_is_invisible_and_continued(
    store: RemoteStore, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.require_writable()
    upload(store, run, 10)
    sent: list[str] = []
    put = store.put

    def put_or_crash(local: Path, step: int, name: str) -> None:
        if len(sent) == crash_at:
            raise Interrupted
        put(local, step, name)
        sent.append(name)

    monkeypatch.setattr(store, "put", put_or_crash)
    for crash_at in range(3):
        sent.clear()
        store.remove(20)
        with pytest.raises(Interrupted):
            upload(store, run, 20)
        assert store.steps() == [10]
        assert fetch_newest(store, Run(tmp_path / f"other-{crash_at}")) == 10
        sent.clear()
        num_done, crash_at = crash_at, 99
        upload(store, run, 20)
        assert sent == ["rank-00000.bin", "rank-00000.json", "checkpoint.json"][num_done:]
        assert store.steps() == [10, 20]


def test_a_file_of_equal_size_and_other_bytes_is_uploaded_again(store: RemoteStore, run: Run, tmp_path: Path) -> None:
    store.require_writable()
    upload(store, run, 20)
    store.hide(20)
    other = tmp_path / "rank-00000.bin"
    other.write_bytes(bytes((run.checkpoint(20) / other.name).stat().st_size))
    store.put(other, 20, other.name)
    sent = (other.name, "checkpoint.json")
    assert upload(store, run, 20) == sum((run.checkpoint(20) / name).stat().st_size for name in sent)
    assert fetch_newest(store, Run(tmp_path / "other")) == 20


def test_damage_at_the_url_is_found_and_an_older_checkpoint_fetched(
    store: RemoteStore, run: Run, tmp_path: Path
) -> None:
    store.require_writable()
    for step in (10, 20):
        upload(store, run, step)
    broken = tmp_path / "rank-00000.bin"
    broken.write_bytes(bytes((run.checkpoint(20) / broken.name).stat().st_size))
    store.put(broken, 20, broken.name)
    other = Run(tmp_path / "other")
    assert fetch_newest(store, other) == 10
    assert [path.name for path in other.checkpoints.iterdir()] == ["step-10"]
    store.put(broken, 10, broken.name)
    with pytest.raises(DamagedCheckpoint, match=r"no checkpoint at .* is intact"):
        fetch_newest(store, Run(tmp_path / "third"))


def test_damaged_files_are_not_uploaded(store: RemoteStore, run: Run) -> None:
    store.require_writable()
    path = run.checkpoint(20) / "rank-00000.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedCheckpoint, match="was not uploaded"):
        upload(store, run, 20)
    assert store.all_steps() == []


def test_retention_applies_at_the_url_and_leftovers_go(store: RemoteStore, run: Run, tmp_path: Path) -> None:
    store.require_writable()
    save(run.checkpoint(30), state(30), {"step": 30, "validation_loss": 0.5})
    for step in (10, 20, 30):
        upload(store, run, step)
    store.put(run.checkpoint(10) / "rank-00000.bin", 5, "rank-00000.bin")  # of an upload that was abandoned
    assert prune_remote(store, run, RetentionRule(keep=1, keep_every=10)) == [5]
    assert prune_remote(store, run, RetentionRule(keep=1, keep_best=2)) == [10]
    assert store.steps() == [20, 30]
    assert prune_remote(store, run, RetentionRule(keep=1)) == [20]
    assert store.all_steps() == [30]


def test_another_save_of_a_step_replaces_it(store: RemoteStore, run: Run, tmp_path: Path) -> None:
    store.require_writable()
    upload(store, run, 20)
    other = Run(tmp_path / "again")
    save(other.checkpoint(20), state(7.0), {"step": 20})
    upload(store, other, 20)
    fetched = Run(tmp_path / "fetched")
    assert fetch_newest(store, fetched) == 20
    assert float(load_parameters(fetched.checkpoint(20))["w"][0, 0]) == 7.0


def test_a_url_that_cannot_be_used_is_one_error(tmp_path: Path, run: Run) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.remote = .*/missing/remote' cannot be used"):
        RemoteStore(f"file://{tmp_path}/missing/remote").require_writable()
    with pytest.raises(ConfigError, match="is no URL that fsspec knows"):
        RemoteStore("nosuch://bucket")
    store = RemoteStore(f"file://{tmp_path}/remote")
    store.require_writable()
    (tmp_path / "remote").rmdir()
    with pytest.raises(CheckpointError, match="is gone"):
        upload(store, run, 20)


def test_a_missing_bucket_or_wrong_credentials_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as (bucket, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CheckpointError, match="check that the bucket or folder exists"):
            RemoteStore("s3://other/run").require_writable()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(CheckpointError, match="credentials"):
            RemoteStore(f"s3://{bucket}/run").require_writable()
        gc.collect()


def test_files_are_sent_in_an_order_that_ends_with_the_index(run: Run) -> None:
    names = [path.name for path in uploading.files_before_index(run.checkpoint(20))]
    assert names == ["rank-00000.bin", "rank-00000.json"]
