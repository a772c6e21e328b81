"""Replicas that sum changes of parameters every few steps, as a user starts them: losses, kills and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.config.write import to_toml
from meshwright.data.dataset import build_dataset
from meshwright.data.loader import Loader
from meshwright.data.order import Share
from meshwright.models.build import build_model
from meshwright.models.initial import initialize
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.optimizer.optimizer import learning_rate
from training_runs import tiny_job

LOCAL = {"independent": True, "sync_every": 2}
STREAMED = {"independent": True, "sync_every": 4, "fragments": 2, "sync_delay_steps": 1, "merge_factor": 0.5}


class Training:
    """A job file for replicas of one rank each, and what its runs left."""

    def __init__(self, folder: Path, num_replicas: int, name: str = "run", **sections: dict[str, Any]) -> None:
        self.num_replicas, self.run = num_replicas, Run(folder / name)
        own: dict[str, dict[str, Any]] = {
            "layout": {"dp_shard": 1, "dp_replicate": num_replicas},
            "checkpoint": {"interval": 2},
            "run": {"device": "cpu", "dir": str(self.run.folder), "timeout_s": 300.0, "max_restarts": 3},
        }
        merged = {key: {**own.get(key, {}), **sections.get(key, {})} for key in own.keys() | sections.keys()}
        self.job = Job.from_dict(tiny_job(folder, **merged))
        self._file, self._printed = folder / f"{name}.toml", folder / f"{name}.txt"
        self._file.write_text(to_toml(self.job))

    def start(self, *arguments: str, ranks_of_replica: int = 1) -> subprocess.Popen[bytes]:
        num_ranks = self.num_replicas * ranks_of_replica
        command = [sys.executable, "-m", "meshwright", "train", str(self._file), "--ranks", str(num_ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        # Not into a pipe, which fills up where no one reads it, and then blocks the rank that prints.
        with self._printed.open("w") as out:
            return subprocess.Popen(
                [*command, *arguments], stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )

    def train(self, *arguments: str, ranks_of_replica: int = 1) -> str:
        """Return what a run printed that ended well, or where train.stop_after ends it."""
        code = self.start(*arguments, ranks_of_replica=ranks_of_replica).wait(timeout=600)
        assert code in (0, 75), self.output
        return self.output

    @property
    def output(self) -> str:
        """Return what the newest start has printed so far."""
        return self._printed.read_text()

    @property
    def parameter_hash(self) -> str:
        return str(Manifest.from_json(self.run.manifest.read_text()).results["parameter_hash"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.run.metrics.read_text().splitlines()]
        return [row for row in rows if "loss" in row]

    def wait_for(self, pattern: str) -> None:
        """Return once the log of the run holds a pattern."""
        deadline_s = time.monotonic() + 300
        while time.monotonic() < deadline_s:
            logs = [self.run.rank_log(0), *(own.rank_log(0) for own in self.run.replicas())]
            if any(re.search(pattern, log.read_text()) for log in logs if log.exists()):
                return
            time.sleep(0.05)
        raise AssertionError(f"no log holds {pattern!r}")

    def pid_of(self, replica: int) -> int:
        return int(json.loads(self.run.of_replica(replica).heartbeat(0).read_text())["pid"])


def diloco(job: Job, num_replicas: int) -> dict[str, Tensor]:
    """Return the final parameters by the paper's algorithm, in plain torch in this process, on the same batches."""
    dataset, rate = build_dataset(job.data, job.train.seq_len), job.replicas.outer_learning_rate
    outer, *models = (build_model(job.model) for _ in range(num_replicas + 1))
    for model in (outer, *models):
        initialize(model, job.train.seed)
    sgd = torch.optim.SGD(outer.parameters(), lr=rate, momentum=job.replicas.outer_momentum, nesterov=True)
    adamws, loaders = [], []
    for member, model in enumerate(models):
        groups = [
            {
                "params": [one for one in model.parameters() if one.dim() > 1],
                "weight_decay": job.optimizer.weight_decay,
            },
            {"params": [one for one in model.parameters() if one.dim() <= 1], "weight_decay": 0.0},
        ]
        adamws.append(torch.optim.AdamW(groups, betas=job.optimizer.betas, eps=job.optimizer.eps))
        share = Share(job.global_batch_size, job.layout.microbatch_size, 0, 1, member, num_replicas)
        loaders.append(Loader(dataset, share, seed=job.train.seed))
    for step in range(1, job.train.steps + 1):
        for model, adamw, loader in zip(models, adamws, loaders, strict=True):
            batches = loader.microbatches(step - 1)
            for batch in batches:
                logits = model(batch.inputs).flatten(0, 1)
                (torch.nn.functional.cross_entropy(logits, batch.targets.flatten()) / len(batches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.max_grad_norm)
            for group in adamw.param_groups:
                group["lr"] = learning_rate(step, job.train.steps, job.optimizer)
            adamw.step()
            adamw.zero_grad()
        if step % job.replicas.sync_every == 0:
            for shared, *own in zip(*(each.parameters() for each in (outer, *models)), strict=True):
                shared.grad = shared.detach() - torch.stack([one.detach() for one in own]).mean(0)
            sgd.step()
            for model in models:
                model.load_state_dict(outer.state_dict())
    for loader in loaders:
        loader.close()
    return {name: parameter.detach() for name, parameter in outer.named_parameters()}


@pytest.mark.long
def test_two_replicas_train_as_plain_torch_does(tmp_path: Path) -> None:
    training = Training(tmp_path, 2, replicas=LOCAL)
    training.train()
    found = load_parameters(training.run.checkpoint(6))
    for name, expected in diloco(training.job, 2).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6)
    # Both replicas end with the same bits, and have summed nothing between.
    own = load_parameters(training.run.of_replica(1).checkpoint(6))
    assert all(torch.equal(found[name], own[name]) for name in found)
    num_bytes = 4 * sum(tensor.numel() for tensor in found.values())
    assert [row["summed_bytes"] for row in training.rows] == [0, num_bytes] * 3


@pytest.mark.long
def test_a_replica_alone_with_rate_1_trains_as_without_replicas(tmp_path: Path) -> None:
    average = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
    local, plain = Training(tmp_path, 1, replicas=LOCAL | average), Training(tmp_path, 1, "plain")
    local.train()
    plain.train()
    assert local.parameter_hash == plain.parameter_hash


@pytest.mark.long
def test_a_stopped_run_resumes_to_the_bit(tmp_path: Path) -> None:
    train = {"steps": 12}
    whole = Training(tmp_path, 2, "whole", replicas=STREAMED, train=train)
    whole.train()
    stopped = Training(tmp_path, 2, "stopped", replicas=STREAMED, train=train)
    assert "started again" not in stopped.train("train.stop_after=6")
    stopped.train("--resume")
    assert stopped.parameter_hash == whole.parameter_hash
    assert {row["step"]: row["loss"] for row in stopped.rows} == {row["step"]: row["loss"] for row in whole.rows}


@pytest.mark.long
def test_states_of_all_replicas_are_resharded(tmp_path: Path) -> None:
    train = {"steps": 12}
    whole = Training(tmp_path, 2, "whole", replicas=STREAMED, train=train)
    whole.train()
    other = Training(tmp_path, 2, "other", replicas=STREAMED, train=train)
    other.train("train.stop_after=6", "layout.pp=2", ranks_of_replica=2)
    other.train("--resume")
    for one, expected in zip(other.rows, whole.rows, strict=True):
        assert one["loss"] == pytest.approx(expected["loss"], rel=1e-5), one["step"]


@pytest.mark.long
def test_a_killed_replica_comes_back_and_all_stop_at_one_sync(tmp_path: Path) -> None:
    training = Training(tmp_path, 2, replicas=LOCAL, train={"steps": 1_000_000}, checkpoint={"interval": 1000})
    process = training.start()
    try:
        training.wait_for(r"step 5/")
        os.kill(training.pid_of(1), signal.SIGKILL)
        training.wait_for(r"that of replicas 0\n")
        training.wait_for(r"that of replicas 0, 1\n")
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=300)
    assert code == 75, training.output
    assert "replica 1 is started again" in training.output
    last = max(training.run.checkpoint_steps())
    owners = [own for own in training.run.replicas() if last in own.checkpoint_steps()]
    assert last % 2 == 0
    assert len(owners) == 1
    one, other = load_parameters(training.run.checkpoint(last)), load_parameters(owners[0].checkpoint(last))
    assert all(torch.equal(one[name], other[name]) for name in one)
