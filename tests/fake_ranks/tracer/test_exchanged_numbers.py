"""Numbers that ranks bring to collectives reach the others; what they do not tell is a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import run
from meshwright.errors import ExitCode

PROGRAM = """
import torch
import torch.distributed as dist
import torch.nn.functional as F

def uneven(device, rank, world_size):
    x = torch.randn(10 + rank, 4, device=device)
    def step():
        rows = torch.tensor([x.shape[0]], device=device)
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        most = int(rows.item())
        padded = F.pad(x, (0, 0, 0, most - x.shape[0]))
        dist.all_gather_into_tensor(torch.empty(world_size * most, 4, device=device), padded)
    return step
def gathered(device, rank, world_size):
    x = torch.randn(10 + rank, 4, device=device)
    def step():
        rows = torch.tensor([x.shape[0]], device=device)
        all_rows = torch.zeros(world_size, dtype=torch.long, device=device)
        dist.all_gather(list(all_rows.chunk(world_size)), rows)
        whole = torch.zeros(int(all_rows.sum()), 4, device=device)
        last = int(all_rows.cumsum(0)[rank])
        whole[last - x.shape[0] : last] = x
        dist.all_reduce(whole)
    return step
def exchanged(device, rank, world_size):
    sends = [1 + (rank + peer) % 3 for peer in range(world_size)]
    x = torch.randn(sum(sends), 4, device=device)
    def step():
        counts = torch.tensor(sends, device=device)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        rows = arriving.tolist()
        dist.all_to_all_single(torch.empty(sum(rows), 4, device=device), x, rows, sends)
    return step
def received(device, rank, world_size):
    x = torch.randn(5 + rank, 4, device=device)
    def step():
        if rank < world_size - 1:
            dist.send(torch.tensor(list(x.shape), device=device), rank + 1)
            dist.send(x, rank + 1)
        if rank > 0:
            shape = torch.empty(2, dtype=torch.long, device=device)
            dist.recv(shape, rank - 1)
            dist.recv(torch.empty(*shape.tolist(), device=device), rank - 1)
    return step
def on_host(device, rank, world_size):
    group, x = dist.new_group(backend="gloo"), torch.randn(4, device=device)
    def step():
        times = torch.tensor([rank])
        dist.all_reduce(times, group=group)
        for _ in range(int(times.item())):
            dist.all_reduce(x)
    return step
def by_itself(device, rank, world_size):
    x = torch.randn(4, device=device)
    def step():
        own = torch.tensor([rank], device=device)
        dist.all_reduce(own)
        for _ in range(int(own) + rank):
            dist.all_reduce(x)
    return step
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "exchanging.py"
    file.write_text(PROGRAM)
    return file


def simulated(capsys: pytest.CaptureFixture[str], build: str) -> tuple[int | str | None, dict[str, Any]]:
    with pytest.raises(SystemExit) as ending:
        run(["simulate", "--build", build, "--ranks", "3", "--json"])
    page: dict[str, Any] = json.loads(capsys.readouterr().out)
    return ending.value.code, page


@pytest.mark.parametrize("function", ["uneven", "gathered", "exchanged", "received", "on_host"])
def test_sizes_that_ranks_tell_each_other_are_taken(
    capsys: pytest.CaptureFixture[str], file: Path, function: str
) -> None:
    code, page = simulated(capsys, f"{file}:{function}")
    assert (code, page["problems"], page["guesses"]) == (ExitCode.DONE, [], [])


def test_what_a_rank_adds_of_its_own_is_found(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    code, page = simulated(capsys, f"{file}:by_itself")
    assert code == ExitCode.BAD_INPUT
    assert "the 4th collective of ranks 0, 1 and 2 differs" in page["problems"][0]["rule"].replace("5th", "4th")
