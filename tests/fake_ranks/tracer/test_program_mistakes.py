"""A program that cannot be traced is refused in one message: its file and line, the rule, and what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.errors import ExitCode

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist

def takes_two(device, rank): ...
def returns_none(device, rank, world_size): ...
def step_takes_one(device, rank, world_size):
    return lambda batch: None
def is_empty(device, rank, world_size):
    return lambda: None
def leaves_one_idle(device, rank, world_size):
    x = torch.ones(4, device=device)
    return lambda: x.add_(1) if rank else None
def exits(device, rank, world_size):
    return lambda: sys.exit(3) if rank == 1 else None
def exits_at_once(device, rank, world_size):
    return lambda: os._exit(0) if rank == 1 else None
def sends(device, rank, world_size):
    return lambda: dist.send(torch.ones(4, device=device), 5)
def broadcasts(device, rank, world_size):
    return lambda: dist.broadcast(torch.ones(4, device=device), 5)
def fails_within(device, rank, world_size):
    def step():
        try:
            raise KeyError("sample 17")
        except KeyError as error:
            raise RuntimeError("a stage failed") from error
    return step
def leaves_unused(device, rank, world_size):
    layers = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "spare": torch.nn.Linear(4, 4)}).to(device)
    layers.forward = lambda x: layers["used"](x)
    model = torch.nn.parallel.DistributedDataParallel(layers)
    return lambda: model(torch.ones(2, 4, device=device)).sum().backward()
def on_nccl(device, rank, world_size):
    dist.init_process_group("nccl")
    return lambda: dist.all_reduce(torch.ones(4))
def on_host(device, rank, world_size):
    return lambda: dist.all_reduce(torch.ones(4))
def holds_too_much(device, rank, world_size):
    def step():
        kept = torch.empty(100, 2**30, device=device, dtype=torch.uint8)
        torch.ones(4, device=device).add_(1)
    return step
one_number = 3
"""
REFUSED = {
    "takes_two": "takes_two ({file}:6) does not take (device, rank, world_size)",
    "returns_none": "returns_none ({file}:7) returned None, not a step: return a function",
    "step_takes_one": "the step <lambda> ({file}:9) is called without arguments: missing a required argument: 'batch'",
    "is_empty": "its step runs no operation of the device on any rank",
    "exits": "rank 1 of 2 of mistakes:exits cannot be traced: sys.exit(3) is called ({file}:16)",
    "exits_at_once": "rank 1 of 2 of mistakes:exits_at_once cannot be traced: its process exited with code 0",
    "sends": "({file}:20): send: rank 5 of a group of ranks 0 to 1",
    "broadcasts": "({file}:22): broadcast_: rank 5 of a group of ranks 0 to 1",
    "fails_within": "RuntimeError ({file}:28): a stage failed; caused by KeyError: 'sample 17'",
    "leaves_unused": "gave parameters no gradient (spare.weight, spare.bias)",
    "on_nccl": "({file}:37): No backend type associated with device type cpu: the group's only backend is nccl",
    "one_number": "{file} has an object of type int, no function, one_number: use one of broadcasts, exits,",
    "absent": "{file} has no function absent: use one of broadcasts, exits,",
    "": "names no function: write FILE.py:FUNCTION",
}
MODULES = {
    "exits_at_import": ("import sys\nsys.exit(5)\n", "sys.exit(5) is called ({file}:2)"),
    "unreadable": ("x = 1\ndef f(:\n", "syntax error: invalid syntax ({file}:2)"),
    "needs_another": ("import no_such_package\n", "({file}:1): No module named 'no_such_package'"),
}


def refusal(capsys: pytest.CaptureFixture[str], build: str) -> str:
    assert run(["simulate", "--build", build, "--ranks", "2"]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert f"\n{said}".count("\nerror: ") == 1
    return said


@pytest.mark.parametrize("function", REFUSED)
def test_a_builder_that_cannot_be_traced(capsys: pytest.CaptureFixture[str], tmp_path: Path, function: str) -> None:
    file = tmp_path / "mistakes.py"
    file.write_text(PROGRAM)
    assert REFUSED[function].format(file=file) in refusal(capsys, f"{file}:{function}")


def test_a_rank_may_be_idle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mistakes.py"
    file.write_text(PROGRAM)
    with pytest.raises(SystemExit) as ending:
        run(["simulate", "--build", f"{file}:leaves_one_idle", "--ranks", "2", "--json"])
    assert ending.value.code == ExitCode.DONE
    outcome = json.loads(capsys.readouterr().out)["outcome"]
    idle, busy = outcome["ranks"]
    assert idle["parts"]["compute_s"] == 0 < busy["parts"]["compute_s"]


def shown(capsys: pytest.CaptureFixture[str], file: Path, function: str) -> tuple[int | str | None, str]:
    """Return the exit code and the page of a program that can be traced."""
    file.write_text(PROGRAM)
    with pytest.raises(SystemExit) as ending:
        run(["simulate", "--build", f"{file}:{function}", "--ranks", "2", "--html", str(file.with_suffix(".html"))])
    return ending.value.code, " ".join(capsys.readouterr().out.split())


def test_a_step_of_the_host_alone_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, page = shown(capsys, tmp_path / "mistakes.py", "on_host")
    assert code == ExitCode.DONE
    assert "(CPU tensors) allreduce" in page


def test_what_does_not_fit_names_the_line_that_holds_most(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, page = shown(capsys, tmp_path / "mistakes.py", "holds_too_much")
    assert code == ExitCode.BAD_INPUT
    assert "largest: temporary, 100 GiB in one tensor (empty, mistakes.py:42)" in page
    assert "make these tensors smaller" in page
    assert "layout" not in page
    assert " pp " not in page


@pytest.mark.parametrize("name", MODULES)
def test_a_file_that_cannot_be_imported(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.py"
    text, said = MODULES[name]
    file.write_text(text)
    assert said.format(file=file) in refusal(capsys, f"{file}:build")


def test_what_does_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "absent.py"
    assert f"there is no file {file}" in refusal(capsys, f"{file}:build")
    assert "there is no module no_such_module" in refusal(capsys, "no_such_module:build")
