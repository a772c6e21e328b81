"""`make transcript`: records what `make demo` shows as docs/transcript.txt, and draws that as docs/transcript.svg.

A test compares both with each other and with examples/demo.py, so that neither can fall behind.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
TEXT, PICTURE = HERE / "transcript.txt", HERE / "transcript.svg"
NUM_COLUMNS = 100

# The demo prints its colours to a terminal only; a line's first characters say which it had.
STYLES = {"$ ": "bold green", "✓ ": "bold green", "  kill -9": "bold red", "  █": "cyan"}


def record() -> str:
    """Return what a new demo shows; CalledProcessError if it fails."""
    command = [sys.executable, str(HERE.parent / "examples" / "demo.py")]
    environment = os.environ | {"COLUMNS": str(NUM_COLUMNS), "NO_COLOR": "1"}
    shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in shown.strip().splitlines()) + "\n"


def draw(text: str) -> str:
    """Return the transcript as an SVG."""
    console = Console(record=True, width=NUM_COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in text.splitlines():
        console.print(_styled(line), soft_wrap=False)
    return console.export_svg(title="make demo", unique_id="demo")


def _styled(line: str) -> Text:
    styled = Text(line)
    for start, style in STYLES.items():
        if line.startswith(start):
            styled.stylize(style, 0, len(line) if start.startswith("  ") else len(start))
            return styled
    if line[:1].isdigit() and line[1:3] == ". ":
        styled.stylize("bold")
    return styled


if __name__ == "__main__":
    transcript = record()
    TEXT.write_text(transcript, encoding="utf-8")
    PICTURE.write_text(draw(transcript), encoding="utf-8")
    print(f"wrote {TEXT.relative_to(HERE.parent)} and {PICTURE.relative_to(HERE.parent)}")
