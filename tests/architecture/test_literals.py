"""Cost formulas hold no measured number: those are in constants.toml, with their source."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from repository import SOURCE

FILES = sorted((SOURCE / "cost").rglob("*.py"))


def is_measured(number: float) -> bool:
    """Return whether a literal is neither whole, nor a half, nor a power of ten (a unit, or a guard against 0)."""
    return not (number == round(number) or number == 0.5 or math.isclose(math.log10(number) % 1, 0, abs_tol=1e-9))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_measured_numbers_are_constants_with_a_source(file: Path) -> None:
    found = [
        f"{file.name}:{node.lineno}: {node.value}: give it a name and a source in cost/constants.toml"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and is_measured(node.value)
    ]
    assert found == []


def test_what_counts_as_measured() -> None:
    assert [one for one in (0.8, 1.15, 1.7, 2.5, 8.0, 0.5, 1e-12, 1e9) if is_measured(one)] == [0.8, 1.15, 1.7, 2.5]
