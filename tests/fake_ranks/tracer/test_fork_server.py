"""Tracing processes are forks of one that has imported torch, and see what a new interpreter would see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.errors import UnsupportedError
from meshwright.tracer.programs.fork_server import server_socket
from meshwright.tracer.programs.trace_ranks import trace


def test_a_fork_sees_the_environment_folder_and_modules_of_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_socket()
    (tmp_path / "late_builder.py").write_text(
        "import os, sys\n"
        "def build(device, rank, world_size):\n"
        "    raise ValueError(os.environ['SEEN_BY_A_FORK'], os.getcwd(), os.environ['OMP_NUM_THREADS'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SEEN_BY_A_FORK", "yes")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError) as refused:
        trace("late_builder:build", 0, 1)
    assert f"('yes', '{os.getcwd()}', '1')" in str(refused.value)


def test_the_death_of_a_fork_is_an_error_and_the_next_one_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying_builder.py").write_text(
        "import os, signal\n"
        "def build(device, rank, world_size, who):\n"
        "    os.kill(0 if who == 'all' else os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"exit code 137"):
        trace("dying_builder:build", 0, 1, ["all"])
    with pytest.raises(UnsupportedError, match=r"rank 0 was ended by SIGKILL"):
        trace("dying_builder:build", 0, 1, ["itself"])


def test_the_server_is_started_once_for_each_setting_that_torch_reads_at_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEEN_BY_A_FORK", "yes")
    first = server_socket()
    monkeypatch.setenv("SEEN_BY_A_FORK", "no")
    assert server_socket() is first
    monkeypatch.setenv("TORCH_LOGS", "")
    assert server_socket() is not first
