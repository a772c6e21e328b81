"""docs/mistakes.md shows what the commands really say."""

import subprocess
import sys

from repository import ROOT

SCRIPT = ROOT / "examples" / "mistakes.py"


def test_the_gallery_of_mistakes_is_what_the_commands_say() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
