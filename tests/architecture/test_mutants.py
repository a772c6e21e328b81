"""The bugs that `make mutants` plants: there are thirty at least, and each can still be planted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants.run import PACKAGE, ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


def test_there_are_thirty() -> None:
    assert len(MUTANTS) >= 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted_and_something_looks_for_it(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copy(PACKAGE / mutant.file, copy)
    mutant.plant(tmp_path)
    compile(copy.read_text(), mutant.file, "exec")
    paths = [argument for argument in (*mutant.tests, *mutant.prove[:1]) if "/" in argument]
    assert paths
    assert all((ROOT / path).exists() for path in paths)
