"""Plants each bug of mutants.toml in a copy of the package, runs what should see it, and prints the survivors.

    python tests/mutants/run.py [NAME]...        all of them, or those that are named

A mutant is killed when one of its tests fails, or when `meshwright prove` finds one of its layouts wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "meshwright"
_TESTS_FAILED, _PROOF_FAILED = 1, 70


@dataclass(frozen=True)
class Mutant:
    """One planted bug, and what should see it."""

    name: str
    file: str
    """Below src/meshwright."""
    old: str
    """Occurs once in the file."""
    new: str
    tests: list[str] = field(default_factory=list)
    """Arguments of pytest."""
    prove: list[str] = field(default_factory=list)
    """Arguments of `meshwright prove`, the job's file first."""

    def plant(self, package: Path) -> None:
        """Put the bug into the copy of the package; raises ValueError where `old` does not occur once."""
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in {self.file}: make `old` occur once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def read_mutants() -> list[Mutant]:
    """Return the mutants of mutants.toml, in its order."""
    with Path(__file__).with_name("mutants.toml").open("rb") as file:
        return [Mutant(name, **entry) for name, entry in tomllib.load(file).items()]


def survives(mutant: Mutant) -> bool:
    """Return whether neither the tests nor the proof of `mutant` see it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        shutil.copytree(ROOT / "src", Path(folder, "src"), ignore=shutil.ignore_patterns("__pycache__"))
        mutant.plant(Path(folder, "src", "meshwright"))
        environment = os.environ | {"PYTHONPATH": str(Path(folder, "src")), "XDG_CACHE_HOME": folder}
        if mutant.prove:
            command = [sys.executable, "-m", "meshwright", "prove", *mutant.prove, "--steps", "2"]
            if _code(command, environment, (0, _PROOF_FAILED)) == _PROOF_FAILED:
                return False
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        return not mutant.tests or _code(command, environment, (0, _TESTS_FAILED)) == 0


def _code(command: list[str], environment: dict[str, str], expected: tuple[int, int]) -> int:
    """Return the exit code; raises RuntimeError for one that says nothing of the mutant, such as a missing file."""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in expected:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode


def main() -> None:
    """Run the mutants that are named, or all, and exit with 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    mutants = [mutant for mutant in read_mutants() if not names or mutant.name in names]
    if unknown := sorted(set(names) - {mutant.name for mutant in mutants}):
        sys.exit(f"mutants: {', '.join(unknown)}: not in mutants.toml")
    survivors = []
    for number, mutant in enumerate(mutants, start=1):
        is_alive = survives(mutant)
        survivors += [mutant.name] if is_alive else []
        print(f"[{number}/{len(mutants)}] {mutant.name}: {'SURVIVES' if is_alive else 'killed'}", flush=True)
    print(f"{len(mutants)} planted, {len(survivors)} survive{': ' + ', '.join(survivors) if survivors else ''}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
