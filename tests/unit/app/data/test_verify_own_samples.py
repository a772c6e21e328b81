"""`data verify` of a class of one's own names the samples that fail, and its line that counts them wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw

_CLASSES = """
import numpy

class Good:
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return numpy.zeros(16, int), numpy.zeros(16, int)

class TooLong(Good):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        if index >= 50:
            raise IndexError(index)
        return super().__getitem__(index)

class Short(Good):
    def __getitem__(self, index):
        return numpy.zeros(9, int), numpy.zeros(9, int)

class Negative(Good):
    def __len__(self):
        return -3

class Fraction(Good):
    def __len__(self):
        return 5.0
"""


@pytest.fixture
def own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return what verifies the samples of one of the classes above."""
    (tmp_path / "lengths_of_samples.py").write_text(_CLASSES)
    (tmp_path / "own.toml").write_text('[model]\nsource = "llama-1m"\n[train]\nseq_len = 16\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: mw.datasets.verify(tmp_path / "own.toml", f"data.source=lengths_of_samples:{name}")


def test_samples_beyond_the_last_are_named(own_classes: Any) -> None:
    found = own_classes("TooLong")
    assert [one.where for one in found.problems] == [f"sample {number}" for number in range(50, 60)]
    assert "raised IndexError: 50 (" in found.problems[0].reason
    assert "though its __len__ says 60: correct it" in found.problems[0].reason
    assert "sample 52: " in found.table()
    assert "sample 53: " not in found.table()
    assert "and 7 more like these" in found.table()


def test_problems_that_all_samples_have_are_printed_for_a_few(own_classes: Any) -> None:
    found = own_classes("Short")
    assert len(found.problems) == 50
    assert found.table().count("int64 [9]") == 3
    assert "and 47 more like these: all of the 50 samples read" in found.table()


@pytest.mark.parametrize(("name", "returned"), [("Negative", "-3"), ("Fraction", "5.0")])
def test_a_length_that_is_none_names_the_class_s_line(own_classes: Any, name: str, returned: str) -> None:
    (problem,) = own_classes(name).problems
    assert f"__len__ of data.source = 'lengths_of_samples:{name}' returned {returned} (" in problem.reason
    assert "lengths_of_samples.py, line " in problem.reason
