"""How long documents are and where they are from."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.corpus import map_corpora
from meshwright.data.examine import document_lengths as module
from meshwright.data.examine.document_lengths import document_lengths
from meshwright.data.examine.document_places import document_numbers, document_places
from meshwright.spec.job.sections import DataSection

END = 9


@given(lengths=st.lists(st.integers(1, 40), max_size=20), rest=st.integers(0, 5), at_once=st.integers(1, 50))
def test_lengths_are_counted_over_chunks(lengths: list[int], rest: int, at_once: int) -> None:
    tokens = np.array([*(token for length in lengths for token in [1] * (length - 1) + [END]), *[1] * rest], np.uint16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOKENS_AT_ONCE", at_once)
        found = document_lengths(tokens, END, limit=10)
    assert found.num_longer == sum(length > 10 for length in lengths)
    for place, (num_documents, num_tokens) in enumerate(zip(found.num_documents, found.num_tokens, strict=True)):
        inside = [length for length in lengths if 2**place <= length < 2 ** (place + 1)]
        assert (num_documents, num_tokens) == (len(inside), sum(inside))
    assert sum(found.num_documents) == len(lengths)


def test_a_run_of_tokens_is_of_these_documents() -> None:
    tokens = np.array([1, END, 1, 1, END, END, 1])
    assert document_numbers(tokens, 0, 2, END) == range(0, 1)
    assert document_numbers(tokens, 1, 4, END) == range(0, 2)
    assert document_numbers(tokens, 2, 7, END) == range(1, 4)


def test_places_are_files_and_lines_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    records = [{"text": "first"}, {"text": ""}, {"text": "second"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "c.txt").write_text("c")
    (corpus,) = map_corpora(DataSection(source=str(tmp_path)), "pretrain", lambda one: one)
    expected = [f"{tmp_path}/a.txt", *(f"{tmp_path}/b.jsonl:{line}" for line in (1, 3)), f"{tmp_path}/c.txt"]
    assert document_places(corpus, 3) == expected
    assert document_places(corpus, 1) == expected[:2]
    monkeypatch.setattr("meshwright.data.examine.document_places.MAX_BYTES", 5)
    assert len(document_places(corpus, 3)) < 4
