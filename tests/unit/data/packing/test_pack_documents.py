"""Whole documents are packed by best-fit decreasing, and a row says which is where."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.loader import Loader, positions_in, stack
from meshwright.data.order import Share
from meshwright.data.packing.pack_documents import pack_documents
from meshwright.data.packing.packed_dataset import PackedDataset
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

END = 256


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Return how full each row is that best-fit decreasing makes, placing one document at a time."""
    used: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(used)) if used[row] + length <= capacity]
        if fitting:
            used[max(fitting, key=lambda row: used[row])] += length
        else:
            used.append(length)
    return sorted(used)


@given(data=st.data(), capacity=st.integers(1, 40))
def test_rows_are_those_of_best_fit_decreasing(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    rows = pack_documents(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(np.concatenate([*rows, []]).astype(int).tolist()) == [*range(len(lengths))]
    assert sorted(sum(lengths[document] for document in row) for row in rows) == one_by_one(lengths, capacity)
    assert [row[0] for row in rows] == sorted(row.min() for row in rows)


def corpus(folder: Path, texts: list[str], **changes: Any) -> DataSection:
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "corpus.jsonl").write_text("".join(lines))
    section = DataSection(source=str(folder / "corpus.jsonl"), cache_dir=str(folder / "cache"), packing="whole")
    return section.replace(**({"validation_fraction": 0.0, "mask_documents": True} | changes))


def test_a_row_holds_documents_and_padding(tmp_path: Path) -> None:
    section = corpus(tmp_path, ["abcd", "xyz", "pq"])
    dataset = build_dataset(section, 10)
    loader = Loader(dataset, Share(1), seed=0, shuffle=False)
    (batch,) = loader.microbatches(0)
    loader.close()
    a, x, p = (list(text.encode()) for text in ("abcd", "xyz", "pq"))
    assert batch.inputs.tolist() == [[*a, *x, *p, 0]]
    assert batch.targets.tolist() == [[*a[1:], END, *x[1:], END, *p[1:], END, -100]]
    assert batch.documents is not None
    assert batch.positions is not None
    assert batch.documents.tolist() == [[0] * 4 + [1] * 3 + [2] * 2 + [3]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 0]]
    assert (dataset.num_training_samples, *dataset.notes) == (1, "3 documents in 1 row, 90.0% full")


def test_without_a_mask_positions_are_those_of_the_row(tmp_path: Path) -> None:
    loader = Loader(build_dataset(corpus(tmp_path, ["abcd", "xyz"], mask_documents=False), 10), Share(1), seed=0)
    (batch,) = loader.microbatches(0)
    loader.close()
    assert batch.documents is None
    assert batch.positions is None


@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=3))
def test_positions_restart_where_the_document_changes(rows: list[list[int]]) -> None:
    for row, found in zip(rows, positions_in(stack(rows, range(len(rows)), "documents")).tolist(), strict=True):
        expected = [0]
        for before, now in itertools.pairwise(row):
            expected.append(0 if now != before else expected[-1] + 1)
        assert found == expected


@pytest.mark.parametrize(
    ("too_long", "rows", "note"),
    [
        ("cut", ["abcde", "xy"], "2 documents in 2 rows, 70.0% full (1 cut)"),
        ("skip", ["xy"], "1 document in 1 row, 40.0% full (1 left out as too long)"),
    ],
)
def test_what_is_too_long_is_cut_or_left_out(tmp_path: Path, too_long: str, rows: list[str], note: str) -> None:
    section = corpus(tmp_path, ["abcdefghi", "xy"], too_long=too_long, packing="none")
    dataset = build_dataset(section, 5)
    found = [bytes(value for value in dataset.read(row)[0] if value).decode() for row in range(len(rows))]
    assert (found, *dataset.notes) == (rows, note)
    assert problems(section, 5, None) == []


def test_what_is_too_long_is_an_error_unless_the_job_says_what_to_do(tmp_path: Path) -> None:
    section = corpus(tmp_path, ["abcdefghi", "xy"])
    (problem,) = problems(section, 5, None)
    assert problem == (
        f"1 document of 2 of data.source = {section.source!r} is longer than a sequence, the longest of 10 tokens, and "
        'data.packing = "whole" keeps documents whole: set train.seq_len to 9 or more, or data.too_long to cut or skip'
    )
    with pytest.raises(DataError) as error:
        build_dataset(section, 5)
    assert str(error.value) == problem


def test_too_few_documents_are_an_error(tmp_path: Path) -> None:
    section = corpus(tmp_path, ["abc"], validation_fraction=0.1)
    (problem,) = problems(section, 5, None)
    assert "holds 1 document to learn from but needs 2, one of them for validation" in problem
    with pytest.raises(DataError, match="holds 1 document"):
        build_dataset(section, 5)


def test_the_last_documents_are_held_out_whatever_the_packing(tmp_path: Path) -> None:
    texts = [letter * 3 for letter in "abcdefgh"]
    for packing in ("whole", "none"):
        dataset = build_dataset(corpus(tmp_path, texts, validation_fraction=0.3, packing=packing), 7)
        assert isinstance(dataset, PackedDataset)
        held_out = [dataset.validation_sample(row)[0] for row in range(dataset.num_validation_samples)]
        assert {chr(value) for row in held_out for value in row if value} == {"g", "h"}
        inputs, targets, *_ = dataset.validation_sample(dataset.num_validation_samples)
        assert not inputs.any()
        assert (targets == -100).all()
