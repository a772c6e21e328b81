"""What the trainer does besides stepping: guards, profiles, sinks, its record of a run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_models import write_run
from meshwright.checkpoint.hf.export import export
from meshwright.errors import ExitCode
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.run import Manifest, Run
from run_ranks import run_ranks
from training_runs import FinishedRun, tiny_job, train_on_ranks, train_on_this_rank


class Exploding(nn.Module):
    """Its loss becomes infinite at the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.head = nn.Linear(8, 257)
        self.num_forwards = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        scale = float("inf") if self.num_forwards == 3 else 1.0
        return self.head(self.embedding(tokens)) * scale


class Forgetful(nn.Module):
    """Has a layer that its loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Embedding(257, 257)
        self.unused = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.used(tokens)


def own_model(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, str]:
    """Return a [model] section that names a class of this file."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return {"source": f"test_trainer:{name}", "options": {}}


def test_a_non_finite_loss_stops_before_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, checkpoint={"interval": 1})
    job["model"] = own_model(monkeypatch, "Exploding")
    job["layout"] = {"dp_shard": -1, "microbatch_size": 8}
    with pytest.raises(AssertionError, match="step 3: loss = nan, gradient norm = nan: not finite"):
        run_ranks(train_on_this_rank, 1, job, str(tmp_path / "run"), False)
    finished = FinishedRun(tmp_path / "run", [])
    assert finished.manifest.exit == ExitCode.DO_NOT_RETRY
    assert finished.run.checkpoint_steps() == [1, 2]
    assert list(finished.losses) == [1, 2]


def test_a_parameter_that_never_trains_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path)
    job["model"] = own_model(monkeypatch, "Forgetful")
    with pytest.raises(AssertionError, match=r"no gradient in step 1 for unused\.weight, unused\.bias"):
        run_ranks(train_on_this_rank, 2, job, str(tmp_path / "run"), False)


@pytest.mark.long
def test_a_profile_is_written_by_every_rank(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, train={"steps": 4}, run={"profile_start": 3, "profile_steps": 1})
    finished = train_on_ranks(job, tmp_path / "run", 2)
    traces = sorted(finished.run.timelines.iterdir())
    assert [trace.name for trace in traces] == ["step-3-rank-0.json.gz", "step-3-rank-1.json.gz"]
    names = {event.get("name") for event in json.loads(gzip.decompress(traces[1].read_bytes()))["traceEvents"]}
    assert any(name and "FSDP" in name for name in names)


# tensorboard's protobuf code uses what newer Pythons deprecate.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    reader = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(reader, reason="needs meshwright[tensorboard]")
    finished = train_on_ranks(tiny_job(tmp_path, run={"tensorboard": True}), tmp_path / "run", 1)
    events = accumulator.EventAccumulator(str(finished.run.folder / "tensorboard"))
    events.Reload()
    written = {event.step: event.value for event in events.Scalars("loss")}
    assert written == pytest.approx(finished.losses)


def test_the_manifest_says_what_the_run_was(tmp_path: Path) -> None:
    finished = train_on_ranks(tiny_job(tmp_path), tmp_path / "run", 2)
    manifest = finished.manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.exit == ExitCode.DONE
    assert manifest.results["first_loss"] == finished.losses[1]
    assert manifest.results["last_loss"] == finished.losses[6]
    assert manifest.results["last_step"] == 6
    assert manifest.data["num_bytes"] == (tmp_path / "corpus.txt").stat().st_size
    [attempt] = manifest.attempts
    assert len(set(attempt.pids)) == 2
    assert attempt.layout.dp_shard == 2
    assert attempt.versions["torch"] == torch.__version__
    assert Run(tmp_path / "run").rank_log(0).exists()


def test_a_run_goes_on_from_hugging_face_weights(tmp_path: Path) -> None:
    first = train_on_ranks(tiny_job(tmp_path), tmp_path / "first", 1)
    export(first.run.folder, tmp_path / "exported")
    # A learning rate that changes nothing shows what training started from.
    still = {"learning_rate": 1e-30, "weight_decay": 0.0}
    job = tiny_job(tmp_path, model={"initial_weights": str(tmp_path / "exported")}, optimizer=still, train={"steps": 2})
    assert train_on_ranks(job, tmp_path / "second", 2).parameter_hash == first.parameter_hash


def test_weights_that_are_not_finite_are_named_in_the_error(tmp_path: Path) -> None:
    model = tiny_job(tmp_path)["model"]
    architecture = resolve_architecture(ModelSection(**model))
    assert architecture is not None
    write_run(tmp_path / "first", architecture)
    export(tmp_path / "first", tmp_path / "exported")
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "exported" / "model.safetensors")
    job = tiny_job(tmp_path, model={**model, "initial_weights": str(tmp_path / "exported")}, train={"steps": 1})
    message = r"step 1: loss = nan, .* model\.initial_weights = '.*exported' holds NaN or infinity, so take other"
    with pytest.raises(AssertionError, match=message):
        run_ranks(train_on_this_rank, 2, job, str(tmp_path / "run"), False)
