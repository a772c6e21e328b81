"""Each planted mistake is found, with the rank and the line that are to blame; a sound program passes."""

from __future__ import annotations

import contextlib
import io

import pytest

from meshwright.cli.main import run
from repository import ROOT

PROGRAMS = ROOT / "examples" / "planted_faults.py"


def line_of(text: str) -> str:
    """Return where the only line of the programs that holds `text` is, as the tool names it."""
    [number] = [n for n, line in enumerate(PROGRAMS.read_text().splitlines(keepends=True), start=1) if text in line]
    return f"{PROGRAMS.name}:{number}"


class Simulated:
    """The exit code of the command in this process, whose fork server all programs share, and what it printed."""

    def __init__(self, program: str) -> None:
        self.code: int | str | None
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                self.code = run(["simulate", "--build", f"{PROGRAMS}:{program}", "--ranks", "4"])
            except SystemExit as ending:
                self.code = ending.code
        self.stdout, self.stderr = output.getvalue(), errors.getvalue()


FOUND = {
    "ring_deadlock": ("rank 0 for rank 3, rank 3 for rank 2, rank 2 for rank 1, rank 1 for rank 0", "dist.recv("),
    "reversed_order": ("culprit: rank 3,", "dist.all_reduce(gradient)"),
    "skipped_collective": ("culprit: rank 1: nothing more", "dist.all_reduce(loss)"),
    "missing_barrier": ("culprit: rank 1,", "dist.barrier()"),
    "other_root": ("culprit: rank 3,", "dist.broadcast(x,"),
    "other_reduction": ("(max) of 4 bytes", "op=dist.ReduceOp.MAX"),
    "unequal_splits": ("rank 1 sends 2,048 bytes to rank 0, which expects 3,072", "dist.all_to_all_single(output,"),
    "cpu_tensors": ("culprit: rank 2: nothing more", "dist.all_reduce(num_tokens)"),
    "crossed_groups": (
        "rank 0 for rank 2, rank 2 for rank 0 culprit: rank 2,",
        "dist.all_reduce(tensor, group=group)\n",
    ),
    "members_only_group": ("all ranks have to call new_group()", "pair = dist.new_group([0, 1])"),
    "builder_skipped": ("in the builder or the first call of the step", "dist.broadcast(parameter.data, 0)"),
    "first_call_only": ("culprit: rank 0,", "dist.reduce(x, 0)"),
    "other_group": ("culprit: rank 3", "group=None if rank"),
}
WARNED = {
    "never_waited": (
        "communication is never waited for: call wait()",
        "dist.all_reduce(parameter.grad, async_op=True)",
    ),
    "unordered_streams": ("two streams use a tensor and nothing orders them", "scaled = y * 2"),
}
QUICK = ("builder_skipped", "crossed_groups", "members_only_group", "never_waited")


def cases(programs: dict[str, tuple[str, str]]) -> list[object]:
    marks = {name: () if name in QUICK else (pytest.mark.long,) for name in programs}
    return [pytest.param(name, *message, marks=marks[name], id=name) for name, message in programs.items()]


@pytest.mark.parametrize(("program", "message", "code"), cases(FOUND | WARNED))
def test_a_mistake_names_the_ranks_and_the_line_and_an_undefined_order_is_a_warning(
    program: str, message: str, code: str
) -> None:
    found = Simulated(program)
    assert found.code == (2 if program in FOUND else 0)
    assert message in " ".join(found.stdout.split())
    assert line_of(code) in found.stdout


def test_a_sound_program_is_advised_by_calls_and_has_no_stragglers() -> None:
    found = Simulated("sound")
    assert found.code == 0
    assert "could hide behind computation: with async_op=True, start it" in " ".join(found.stdout.split())
    assert "layout." not in found.stdout
    assert "stragglers" not in found.stdout
    assert "warnings" not in found.stdout


def test_groups_of_the_same_ranks_have_an_order_each() -> None:
    found = Simulated("two_groups")
    assert found.code == 0, found.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "message", "code"),
    [
        ("bad_sample", "rank 2 of 4 of planted_faults:bad_sample cannot be traced: ValueError", "raise ValueError("),
        (
            "host_tensor_with_nccl",
            "No backend type associated with device type cpu",
            "dist.all_reduce(torch.ones(1), group=group)",
        ),
    ],
)
def test_what_cannot_be_traced_names_its_rank_or_rule_and_its_line(program: str, message: str, code: str) -> None:
    found = Simulated(program)
    assert found.code == 2
    said = " ".join(found.stderr.split())
    assert message in said
    assert line_of(code) in said
