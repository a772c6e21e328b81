"""Ten mistakes and the message each one gets: makes docs/mistakes.md by running the real command line.

python examples/mistakes.py            writes docs/mistakes.md again
python examples/mistakes.py --check    exits 1 and shows the difference if the page is not what the commands say
"""

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "mistakes.md"
HEADER = """# Ten mistakes and their messages

Made by `python examples/mistakes.py`, which runs each command; a test runs them again and compares. A message says
which values were given, which rule they break and what to change. `meshwright check` finds all but the last without
starting a process or importing torch, and reports all errors of a job at once.
Long lines are broken here.
"""
# A small job that trains in seconds; the cache stays in the temporary folder.
SMALL_JOB = """\
[data]
max_bytes = 200_000
cache_dir = "cache"

[train]
steps = 2
seq_len = 64

[optimizer]
warmup_steps = 0

[layout]
microbatch_size = 8
"""


@dataclass(frozen=True)
class Mistake:
    """One command that fails, in a folder of its own."""

    title: str
    job: str
    command: Sequence[str]
    exit_code: int
    files: dict[str, str] = field(default_factory=dict)
    """Other files next to job.toml."""
    note: str = ""
    """A sentence for what the job does not show."""
    prepare: Callable[[Path], None] | None = None
    """What happened in the folder before the command."""


def corrupt_newest_checkpoint(folder: Path) -> None:
    """Train two steps, then change one byte in the middle of the largest file of the last checkpoint."""
    done = run(folder, ["train", "job.toml"])
    if done.returncode != 0:
        raise SystemExit(f"the run that was to be damaged failed:\n{done.stdout}{done.stderr}")
    checkpoint = folder / "runs" / "job" / "checkpoints" / "step-2"
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


MISTAKES = [
    Mistake("A key that does not exist", "[train]\nstep = 500\n", ["check", "job.toml"], 2),
    Mistake("A value of the wrong type", '[train]\nsteps = "many"\n', ["check", "job.toml"], 2),
    Mistake("An unknown model", '[model]\nsource = "llama3-7b"\n', ["check", "job.toml"], 2),
    Mistake(
        "A batch that does not divide",
        "[train]\nglobal_batch_size = 6\n\n[layout]\ndp_shard = 2\nmicrobatch_size = 2\n",
        ["check", "job.toml"],
        2,
    ),
    Mistake(
        "Sequences longer than the text",
        '[data]\nsource = "notes.txt"\n\n[train]\nseq_len = 4096\n',
        ["check", "job.toml"],
        2,
        files={"notes.txt": "All that there is to learn from.\n"},
        note="`notes.txt` holds 33 bytes.",
    ),
    Mistake("Data that is not there", '[data]\nsource = "corpus.jsonl"\n', ["check", "job.toml"], 2),
    Mistake(
        "A tokenizer with more tokens than the model",
        '[model]\nsource = "llama-1m"\noptions = { vocab_size = 256 }\n',
        ["check", "job.toml"],
        2,
        note="The byte tokenizer has 256 bytes and the end of text.",
    ),
    Mistake(
        "A layout that fits neither the ranks nor the model",
        "[layout]\ndp_shard = 4\ntp = 3\n",
        ["check", "job.toml", "--ranks", "6"],
        2,
    ),
    Mistake(
        "A run folder that exists",
        '[train]\nsteps = 100\n\n[run]\ndir = "runs/first"\n',
        ["check", "job.toml"],
        2,
        files={"runs/first/manifest.json": "{}", "runs/first/checkpoints/step-50/metadata.json": "{}"},
        note="An earlier run lies in `runs/first`.",
    ),
    Mistake(
        "A checkpoint that was damaged on disk",
        SMALL_JOB,
        ["train", "job.toml", "--resume"],
        70,
        note="One bit of the newest checkpoint was flipped after the run had ended.",
        prepare=corrupt_newest_checkpoint,
    ),
]


def run(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Return what `meshwright ARGUMENTS` did in `folder`; it sees no settings of this machine's user."""
    environment = {
        **os.environ,
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / ".config"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "meshwright", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def section(number: int, mistake: Mistake) -> str:
    """Return the page's section for one mistake; exits if the command ends with another code than it should."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "job.toml").write_text(mistake.job)
        for file, content in mistake.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(content)
        if mistake.prepare is not None:
            mistake.prepare(folder)
        done = run(folder, mistake.command)
        output = shown(done.stdout + done.stderr, folder)
    if done.returncode != mistake.exit_code:
        raise SystemExit(f"{mistake.title}: exit code {done.returncode}, not {mistake.exit_code}:\n{output}")
    job = "" if mistake.job is SMALL_JOB else f"```toml\n{mistake.job}```\n\n"
    note = f"{mistake.note}\n\n" if mistake.note else ""
    command = " ".join(["meshwright", *mistake.command])
    return (
        f"## {number}. {mistake.title}\n\n{job}{note}"
        f"```console\n$ {command}\n{output}\n$ echo $?\n{done.returncode}\n```\n"
    )


def shown(output: str, folder: Path) -> str:
    """Return what a command printed, without the temporary folder's name, in lines that fit the page."""
    lines = output.replace(f"{folder}/", "").replace(str(folder), ".").strip().splitlines()
    return "\n".join("\n".join(textwrap.wrap(line, 100, break_long_words=False)) or line for line in lines)


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEADER, *(section(number, mistake) for number, mistake in enumerate(MISTAKES, start=1))])


def main() -> None:
    """Write the page, or with --check compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare docs/mistakes.md instead of writing it")
    is_check = parser.parse_args().check
    new = page()
    if not is_check:
        PAGE.write_text(new, encoding="utf-8")
        return
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if new != old:
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(PAGE.name), "now"))
        sys.exit("docs/mistakes.md is not what the commands say: run python examples/mistakes.py")


if __name__ == "__main__":
    main()
