"""docs/fine_tuning_run.md: what a fine-tuning run prints, from a Hugging Face folder to a verified export.

`python -m docs.fine_tuning_page` in the repository's root runs its commands in a new folder and writes the page; a test
compares the commands.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path("docs/fine_tuning_run.md")
EXAMPLES = ("tiny.toml", "tiny-sft.toml", "conversations.jsonl")
STEPS = (
    ("A model, trained for a minute", "train tiny.toml --ranks 2 train.steps=80 run.dir=base"),
    ("Its Hugging Face folder, compared with transformers", "export base base-hf --verify"),
    ("What of the conversations is learned", "data preview tiny-sft.toml --count 1"),
    (
        "An adapter on it, on two ranks",
        "train tiny-sft.toml --ranks 2 model.source=base-hf/config.json model.initial_weights=base-hf "
        "adapter.kind=lora adapter.rank=16 train.steps=160 optimizer.learning_rate=6e-3 run.dir=chat",
    ),
    ("PEFT's files", "export chat chat-peft"),
    ("One model, compared with transformers", "export chat chat-hf --merge --verify"),
    ("An answer of that folder", 'generate chat-hf --chat --prompt "What is four plus three?" --temperature 0'),
)
_INTRODUCTION = """\
# A fine-tuning run

From a Hugging Face folder to a merged export that computes what training did, on two CPU cores. Recorded by
`python -m docs.fine_tuning_page`; run the commands in a folder with `tiny.toml`, `tiny-sft.toml` and
`conversations.jsonl` of `examples/`. With another model, start at the third command and name its folder instead of
`base-hf`. What the keys mean: [conversations](how_to/fine_tuning.md), [adapters](how_to/adapters.md).
"""
_REPEATED = re.compile(r"^(step \d+/\d+  loss|checkpoint )")
_NUM_COLUMNS = 100


def record(folder: Path) -> str:
    """Return the page after running all commands in `folder`; CalledProcessError if one fails."""
    for name in EXAMPLES:
        shutil.copy(Path("examples") / name, folder)
    parts = [_INTRODUCTION]
    environment = os.environ | {"COLUMNS": str(_NUM_COLUMNS), "NO_COLOR": "1"}
    for title, command in STEPS:
        words = [sys.executable, "-m", "meshwright", *shlex.split(command)]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        parts.append(f"## {title}\n\n```\n$ meshwright {command}\n{_shortened(done.stdout)}\n```\n")
    return "\n".join(parts)


def _shortened(text: str) -> str:
    """Return the output without most of its steps and checkpoints."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    repeated = [place for place, line in enumerate(lines) if _REPEATED.match(line)]
    left_out = set(repeated[2:-2])
    marked = ["..." if place in left_out else line for place, line in enumerate(lines)]
    return "\n".join(line for place, line in enumerate(marked) if line != "..." or marked[place - 1] != "...")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        PAGE.write_text(record(Path(name)), encoding="utf-8")
    print(f"wrote {PAGE}")
