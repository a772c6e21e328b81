"""Writes docs/planted_faults.md and docs/user_programs.md: what `meshwright simulate` says of example programs.

    python docs/simulations.py

Needs the extras train and hf, and accelerate.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS, PROGRAMS = "examples/planted_faults.py", "examples/user_programs.py"
FAULT_TITLES = {
    "sound": "Nothing",
    "ring_deadlock": "A deadlock",
    "reversed_order": "Another order",
    "skipped_collective": "A collective too few",
    "missing_barrier": "A missing barrier",
    "other_root": "Another root",
    "other_reduction": "Another reduction",
    "unequal_splits": "Splits that do not match",
    "cpu_tensors": "A collective on CPU tensors",
    "host_tensor_with_nccl": "A CPU tensor and a group of NCCL alone",
    "builder_skipped": "A collective of the builder",
    "first_call_only": "A collective of the first call",
    "other_group": "Another group",
    "crossed_groups": "Two groups of the same ranks",
    "members_only_group": "A group that only its members make",
    "bad_sample": "An exception on one rank",
    "never_waited": "Work that nothing waits for",
    "unordered_streams": "Two streams and nothing that orders them",
}
PROGRAM_TITLES = {
    "hf_llama": "transformers with FSDP2",
    "ddp_loader": "DDP, autocast and a DataLoader",
    "accelerate_ddp": "accelerate",
    "tensor_parallel": "DTensor",
    "adapters": "Frozen blocks with adapters",
    "torch_pipeline": "torch.distributed.pipelining",
    "compiled_blocks": "torch.compile",
    "fsdp1": "What is refused",
}
FAULTS_INTRODUCTION = """# Faults that a simulation finds

Mistakes planted on purpose, each with the command and the tool's own answer: exit code 2, or 0 where it is a warning.
The programs are in `examples/planted_faults.py`: plain torch, no job and no model of ours. This page is written by
`python docs/simulations.py`.

The culprit is the minority: the rank that does otherwise than most ranks of its group, or than most groups of that
kind. Lines are those of the user's own files: the innermost call outside of installed packages.
"""
PROGRAMS_INTRODUCTION = """# Simulate a program of your own

`meshwright simulate --build FILE.py:FUNCTION --ranks N` takes a training step in plain torch. The programs below are in
`examples/user_programs.py`; each function gets a device, a rank and the number of ranks, and returns a step. Nothing of
them is written for Meshwright. This page is written by `python docs/simulations.py`, and shows the head of each answer;
[the rest](simulate.md#what-the-page-shows-in-order) is memory by tensor, exposed communication and collectives.

The builder and two calls of the step are run. What ranks have to agree on, collectives and messages, is checked in all
of them; the second call is what is priced and shown. A mistake that shows only in a later call, such as every 100th
step, is not reached: call the code of that step in the first two.

Up to 64 ranks all are traced. Of more, every place of each mesh axis or group of up to 8 ranks is (and combinations of
up to 32 places), the first, the second and the last of a longer one, the first and the last rank of each role, and who
is at the other end of a message that would go unanswered: the page says which. Ranks whose messages go differently far
have roles of their own; where these are too many, the program is refused. A mistake that one rank's number makes
elsewhere is not seen; `--every-rank` finds it, and takes as long as it takes to trace all ranks.

## What numbers read as

Fake tensors hold no numbers. What a program reads by `.item()`, `.tolist()`, `float()` or `bool()` is what a healthy
step would have, where known:

- What the program put into a tensor, such as `torch.tensor(3.0)`, `zeros(())` or `ones(2)`, reads as that, through
  copies, arithmetic, comparisons, `any()`, `all()`, `sum()`, collectives and messages. Ranks take what the others
  bring, such as their numbers of rows before an uneven all-gather: where that is not what they bring themselves, they
  are traced again. A rank that is not traced is taken to bring the same; where traced ones differ, that is a guess. Not
  followed are tensors of more than 64 elements, or 4,096 in a collective: they read as 1, a guess.
- Tests for numbers that are not finite find none: `isnan`, `isinf`, `isfinite`, a comparison with infinity or of a
  tensor with itself.
- The flag of a `GradScaler`, by which it skips a step, reads as 0: the optimizer runs.
- Another fraction, such as a loss or a norm, reads as 1, a guess. Comparisons of such fractions read as what 1 compares
  to, `torch.equal` as True, another boolean as False: guesses, too.
- Another whole number is unknown: one that `.item()` reads may be printed and computed with; where it decides a size
  or a branch, and where `.tolist()` reads it, the line is refused.

A line that decides by a guess while a step runs is named in the answer, under "guessed", with the value; and in the
message, if the program raises after it.
"""
OUT_OF_MEMORY = """## Out of memory

Llama 3 8B on 64 H100 with four sequences of 8,192 tokens in each microbatch, and nothing recomputed. The changes of one
key that would make it fit follow, with the step that each would take.
"""
PADDING = """## Padding

8B sharded over 16,384 ranks: FSDP2 cuts dim 0 of every parameter into equal parts, and most of what is gathered is
padding. Exit code 0: it runs, and wastes.
"""
TOO_LARGE = """examples/llama3-8b.toml layout.activation_checkpoint=none layout.microbatch_size=4
train.global_batch_tokens=2097152"""
TOO_MANY_SHARDS = """examples/llama3-8b.toml --cluster h100-ib400:16384 layout.dp_shard=16384
layout.reshard_after_forward=auto train.global_batch_tokens=134217728"""
_PROGRESS = ("tracing ", "traced after ")


def main() -> None:
    """Write both pages."""
    faults = [program(FAULTS, name, title, ("--ranks", "4")) for name, title in FAULT_TITLES.items()]
    jobs = [
        OUT_OF_MEMORY + answer(TOO_LARGE.split(), ("out of memory", "changes that make it fit")),
        PADDING + answer(TOO_MANY_SHARDS.split(), ("padded by FSDP2",)),
    ]
    write("planted_faults.md", [FAULTS_INTRODUCTION, *faults, *jobs])
    on_a_node = ("--ranks", "8", "--cluster", "h100-ib400:8")
    programs = [program(PROGRAMS, name, title, on_a_node) for name, title in PROGRAM_TITLES.items()]
    write("user_programs.md", [PROGRAMS_INTRODUCTION, *programs])


def write(page: str, sections: list[str]) -> None:
    """Write one page of docs/."""
    Path(__file__).with_name(page).write_text("\n".join(sections), encoding="utf-8")


def program(file: str, name: str, title: str, options: tuple[str, ...]) -> str:
    """Return the section of one program."""
    words = docstring(file, name).removeprefix("Return ")
    head = (
        "the step deadlocks or fails",
        "warnings",
        *(("where the step goes", "memory ") if file == PROGRAMS else ()),
    )
    return f"## {title}\n\n{words[0].upper()}{words[1:]}\n" + answer(["--build", f"{file}:{name}", *options], head)


def answer(arguments: list[str], parts: tuple[str, ...]) -> str:
    """Return a command and those parts of its answer that begin so, as a block of Markdown."""
    command = ["meshwright", "simulate", *arguments]
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    found = [part.strip("\n") for part in run.stdout.split("\n\n") if part.lstrip("\n").startswith(parts)]
    lines = [line.rstrip() for line in "\n\n".join(found).splitlines()]
    if run.returncode and run.stdout and not lines:
        raise RuntimeError(f"{' '.join(command)}: no part of the answer begins with one of {parts}:\n{run.stdout}")
    errors = [line for line in run.stderr.splitlines() if not line.startswith(_PROGRESS)]
    said = "\n".join(lines or errors).replace(f"{ROOT}/", "") or "no problems, no warnings"
    return f"\n```\n$ {' '.join(command)}\n{said}\n(exit code {run.returncode})\n```\n"


def docstring(file: str, name: str) -> str:
    """Return the first line of a program's docstring."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(rf'^def {name}\(.*?"""(.*?)"""', text, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[1]


if __name__ == "__main__":
    main()
