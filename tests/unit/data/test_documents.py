"""Documents are told from the ends of text between them, from the corpus to the microbatch."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.loader import Loader, document_numbers
from meshwright.data.order import Share
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.errors import ConfigError
from meshwright.spec.job.sections import DataSection

END = ByteTokenizer.end_of_text


@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=3))
def test_a_token_is_of_the_document_that_began_after_the_last_end_before_it(rows: list[list[int]]) -> None:
    numbers = document_numbers(torch.tensor(rows), end_of_text=2)
    assert numbers.dtype == torch.int64
    assert numbers.tolist() == [[row[:place].count(2) for place in range(len(row))] for row in rows]


def test_an_end_of_text_is_of_the_document_that_it_ends() -> None:
    assert document_numbers(torch.tensor([[5, 9, 5, 5, 9, 9, 5]]), end_of_text=9).tolist() == [[0, 0, 1, 1, 1, 2, 3]]


def corpus(folder: Path, **changes: bool) -> DataSection:
    for name in ("a", "b", "c", "d"):
        (folder / f"{name}.txt").write_text(name * 4)
    cache = folder.parent / "cache"
    return DataSection(source=str(folder), cache_dir=str(cache), validation_fraction=0.0).replace(**changes)


def test_a_microbatch_says_of_which_document_each_input_is(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    # aaaa|bbbb|cccc|dddd| is 20 tokens: 2 windows of 9 inputs.
    loader = Loader(build_dataset(corpus(folder, mask_documents=True), 9), Share(2, 2), seed=0, shuffle=False)
    (batch,) = loader.microbatches(0)
    loader.close()
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0] * 5 + [1] * 4, [0] + [1] * 5 + [2] * 3]
    assert (batch.inputs[0, 4], batch.targets[0, 3]) == (END, END)


def test_documents_are_not_told_apart_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    loader = Loader(build_dataset(corpus(folder), 9), Share(2, 2), seed=0)
    (batch,) = loader.microbatches(0)
    loader.close()
    assert batch.documents is None


def test_samples_of_ones_own_have_no_ends_to_be_told_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_numbers.py").write_text("def make():\n    return [([1, 2], [2, 3])]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    section = DataSection(source="user_numbers:make", mask_documents=True, validation_fraction=0.0)
    (problem,) = problems(section, 2, None)
    with pytest.raises(
        ConfigError, match=r"mask_documents = true .*'user_numbers:make'.* set data.mask_documents to"
    ) as e:
        build_dataset(section, 2)
    assert str(e.value) == problem
    assert problems(section.replace(mask_documents=False), 2, None) == []
