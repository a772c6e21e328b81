"""Mistakes in the code that a job names: its author sees the traceback once, then one line, and the right exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

from meshwright.config.write import to_toml
from meshwright.errors import ExitCode
from meshwright.exits import exit_code_of
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.rank import RankConfig, train_rank
from run_ranks import run_ranks
from training_runs import tiny_job

MODULE = """
import multiprocessing
import os
import resource
import signal
import time
import torch
from torch import nn

class Works(nn.Module):
    def __init__(self, num_logits=288):
        super().__init__()
        self.embedding = nn.Embedding(288, 8)
        self.head = nn.Linear(8, num_logits)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

class Raises(Works):
    def forward(self, tokens):
        return tokens.no_such_method()

class RaisesOnRank1(Works):
    def forward(self, tokens):
        if os.environ["RANK"] == "1":
            raise ValueError("only here")
        return super().forward(tokens)

class AsksToStop(Works):
    def __init__(self, at_call):
        super().__init__()
        self.calls_left = at_call

    def forward(self, tokens):
        self.calls_left -= 1
        if self.calls_left == 0:
            os.kill(multiprocessing.parent_process().pid, signal.SIGTERM)
            time.sleep(1)  # The launcher passes it on.
        return super().forward(tokens)

class ChangesWhatItSaved(Works):
    def forward(self, tokens):
        x = self.embedding(tokens)
        squared = x * x
        x.add_(1)
        return self.head(squared)

class ReturnsTuple(Works):
    def forward(self, tokens):
        return super().forward(tokens), None

class LossOfEachToken(Works):
    def loss(self, output, targets):
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")

class NothingToTrain(nn.Module):
    def forward(self, tokens):
        return tokens

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(32, dtype=torch.long), undefined_name

class FailsOnce(Data):
    def __getitem__(self, index):
        if index == 5 and not os.path.exists("has_failed"):
            open("has_failed", "w").close()
            raise OSError("could not read sample from the store")
        tokens = torch.zeros(32, dtype=torch.long)
        return tokens, tokens

class FillsItsDisk(Data):
    def __getitem__(self, index):
        raise OSError(28, "No space left on device")

class FillsTheRunFolder(Works):
    # No file of the rank or its launcher grows beyond a heartbeat any more, as on a full disk.
    def forward(self, tokens):
        for pid in (os.getpid(), multiprocessing.parent_process().pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (600, 600))
        return super().forward(tokens)

class Interrupts(Works):
    def forward(self, tokens):
        raise KeyboardInterrupt
"""


def train(folder: Path, num_ranks: int, **sections: dict[str, object]) -> tuple[int, str]:
    """Return the exit code and what is printed when the job trains with the module above next to it."""
    (folder / "mine.py").write_text(MODULE)
    (folder / "job.toml").write_text(to_toml(Job.from_dict(tiny_job(folder, **sections))))
    command = [sys.executable, "-m", "meshwright", "train", "job.toml", "--ranks", str(num_ranks)]
    # The environment that conftest made: readline, which pytest imports, sets COLUMNS behind Python's back.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended = subprocess.run(command, cwd=folder, env=dict(os.environ), text=True, **pipes)
    return ended.returncode, ended.stdout


def train_forked(folder: Path, **sections: dict[str, object]) -> tuple[int, str]:
    """Return the same of one rank, a fork that has imported torch already; what the launcher adds is not there."""
    (folder / "mine.py").write_text(MODULE)
    job = Job.from_dict(tiny_job(folder, **sections, layout={"dp_shard": 1, "microbatch_size": 1}))
    config = RankConfig(job=job, run_dir=str(folder / "run"), module_dir=str(folder))
    [code] = run_ranks(run_rank, 1, config, folder / "output.txt")
    return code, (folder / "output.txt").read_text()


def run_rank(config: RankConfig, output: Path) -> int:
    """Return the exit code of `config` in this process, which writes to `output`."""
    # A rank joins its own group.
    dist.destroy_process_group()
    with socket.create_server(("localhost", 0)) as unused:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(unused.getsockname()[1])}
    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    code = exit_code_of(lambda: train_rank(config))
    sys.stderr.flush()
    return code


def model(name: str, **options: object) -> dict[str, object]:
    return {"source": f"mine:{name}", "options": options}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param("Raises", "AttributeError: 'Tensor' object has", marks=pytest.mark.long),
        pytest.param("RaisesOnRank1", "ValueError: only here", marks=pytest.mark.long),
    ],
)
def test_an_exception_is_shown_once_from_the_jobs_own_code_on(tmp_path: Path, name: str, error: str) -> None:
    code, output = train(tmp_path, 2, model=model(name))
    assert code == ExitCode.DO_NOT_RETRY, output
    assert output.count("Traceback (most recent call last)") == 1
    assert output.count(error) == 1
    assert "meshwright/trainer" not in output
    *_, last = output.splitlines()
    assert last.startswith(f"error: model.source = 'mine:{name}': ")
    assert "came out of the job's own code" in last
    assert str(tmp_path / "mine.py") in last


def test_a_saved_tensor_that_is_changed_in_place_is_one_sentence(tmp_path: Path) -> None:
    code, output = train_forked(tmp_path, model=model("ChangesWhatItSaved"))
    assert code == ExitCode.DO_NOT_RETRY, output
    assert "model.source = 'mine:ChangesWhatItSaved': a tensor that its forward saved for backward, [" in output
    assert "Traceback" not in output


def test_an_exception_in_data_of_ones_own_names_its_place(tmp_path: Path) -> None:
    code, output = train_forked(tmp_path, model=model("Works"), data={"source": "mine:Data"})
    assert code in (ExitCode.BAD_INPUT, ExitCode.DO_NOT_RETRY), output
    assert "name 'undefined_name' is not defined" in output
    # The model is in the same file.
    assert "error: data.source = 'mine:Data': NameError came out of the job's own code" in output
    assert str(tmp_path / "mine.py") in output
    assert "bug in Meshwright" not in output


def test_a_disk_that_data_of_ones_own_has_filled_is_not_the_run_folders(tmp_path: Path) -> None:
    code, output = train_forked(tmp_path, model=model("Works"), data={"source": "mine:FillsItsDisk"})
    assert code in (ExitCode.BAD_INPUT, ExitCode.DO_NOT_RETRY), output
    *_, last = output.splitlines()
    assert "error: data.source = 'mine:FillsItsDisk': [Errno 28] No space left on device" in last
    assert str(tmp_path / "mine.py") in last
    assert "could not read or write" not in output


@pytest.mark.long
def test_a_full_disk_is_said_last_and_in_one_line_for_each_file(tmp_path: Path) -> None:
    code, output = train(tmp_path, 1, model=model("FillsTheRunFolder"))
    assert code == ExitCode.DO_NOT_RETRY, output
    assert "Traceback" not in output
    for line in ("manifest.json could not be", "hangs/rank-0.json could not be"):
        assert output.count(line) == 1, output
    assert "make room or repair the disk, then start again with --resume" in output.splitlines()[-1]


def test_an_interrupt_that_no_signal_asked_for_is_the_jobs_own(tmp_path: Path) -> None:
    code, output = train_forked(tmp_path, model=model("Interrupts"))
    assert code == ExitCode.DO_NOT_RETRY, output
    last = output.splitlines()[-1]
    assert last.startswith("error: the job's own code interrupted the run by KeyboardInterrupt"), output
    assert "mine.py, line" in last


@pytest.mark.long
def test_a_store_that_fails_once_costs_a_restart(tmp_path: Path) -> None:
    given = {"model": model("Works"), "data": {"source": "mine:FailsOnce"}, "run": {"max_restarts": 1}}
    code, output = train(tmp_path, 1, **given)
    assert code == ExitCode.DONE, output
    assert "reading sample 5 of data.source = 'mine:FailsOnce' raised OSError" in output
    assert "error: step " in output
    assert "restart 1 of 1" in output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (model("ReturnsTuple"), "the model's forward returned tuple for targets of (1, 32)"),
        (model("NothingToTrain"), "the model has no trainable parameters"),
        (model("LossOfEachToken"), "returned a tensor of shape (32,), but a scalar tensor is needed"),
        (model("Works", num_logits=10), "the model's forward returned 10 logits"),
    ],
)
def test_what_breaks_the_contract_is_explained_without_a_traceback(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    code, output = train_forked(tmp_path, model=given)
    assert code == ExitCode.BAD_INPUT, output
    assert "Traceback" not in output
    assert message in output.splitlines()[-1]


@pytest.mark.long
def test_a_model_that_ends_in_a_linear_layer_trains_without_a_warning(tmp_path: Path) -> None:
    code, output = train(tmp_path, 2, model=model("Works"))
    assert code == ExitCode.DONE, output
    assert "Warning" not in output


@pytest.mark.long
def test_a_run_that_was_told_to_stop_says_how_to_go_on(tmp_path: Path) -> None:
    code, output = train(tmp_path, 1, train={"stop_after": 2})
    assert code == ExitCode.RETRY, output
    assert "stopped with 4 steps to go: continue with --resume" in output


FIRST = pytest.param(4, ExitCode.RETRY, marks=pytest.mark.long, id="first")
LAST = pytest.param(24, ExitCode.DONE, marks=pytest.mark.long, id="last")


@pytest.mark.parametrize(("at_call", "code"), [FIRST, LAST])
def test_a_signal_in_the_last_step_leaves_a_complete_run(tmp_path: Path, at_call: int, code: ExitCode) -> None:
    # Six steps of four microbatches.
    found, output = train(tmp_path, 1, model=model("AsksToStop", at_call=at_call))
    assert found == code, output
    is_complete = code is ExitCode.DONE
    assert ("the run is complete" in output) is is_complete
    assert ("step 6/6" in output) is is_complete
    assert ("continue with --resume" in output) is not is_complete
    assert ("stopping after step" in output) is not is_complete
