"""A sample as text: every token once, cut at documents and where targets are ignored."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.examine.sample_text import segments_of
from meshwright.data.tokenizer import ByteTokenizer

END = 256
Found = list[tuple[str, bool, bool]]


def found(inputs: list[int], targets: list[int], documents: list[int] | None = None) -> Found:
    parts = [np.array(one) for one in (inputs, targets, documents) if one is not None]
    return [(one.text, one.is_target, one.ends_document) for one in segments_of(tuple(parts), ByteTokenizer())]


def test_a_window_is_cut_after_each_end_of_text() -> None:
    ids = [*b"ab", END, *b"cd", END, *b"e"]
    assert found(ids[:-1], ids[1:]) == [("ab", True, True), ("cd", True, True), ("e", True, False)]


def test_ignored_targets_are_context() -> None:
    ids = [*b"ask", *b"answer", END]
    targets = [-100, -100, *ids[3:]]
    assert found(ids[:-1], targets) == [("ask", False, False), ("answer", True, True)]


def test_a_row_of_whole_documents_says_which() -> None:
    """Each document's last target is of the next one, and ignored; padding has no target."""
    ids = [*b"ab", END, *b"cd", END, END, END]
    targets = [*ids[1:3], -100, *ids[4:6], -100, -100, -100]
    documents = [0, 0, 0, 1, 1, 1, 2, 2]
    cut = found(ids, targets, documents)
    assert cut == [("ab", True, True), ("cd", True, True), ("", False, True)]


def test_the_last_target_of_each_document_of_a_row_is_shown() -> None:
    """It is no input: each document has one token more than places in its row."""
    inputs, targets, documents = [*b"abxy"], [*b"b!y?"], [0, 0, 1, 1]
    assert found(inputs, targets, documents) == [("ab!", True, True), ("xy?", True, False)]


def test_the_first_token_of_a_prompt_is_context() -> None:
    segments = segments_of((np.array([*b"p"]), np.array([END])), ByteTokenizer(), joins_first=False)
    assert [(one.text, one.is_target, one.num_tokens) for one in segments] == [("p", False, 1), ("", True, 1)]


def test_answers_of_pairs_are_told_apart() -> None:
    """Each is a document: the chosen one first."""
    ids, targets = [*b"pcpr"], [*b"c", -100, *b"r", -100]
    segments = segments_of(
        (np.array(ids), np.array(targets), np.array([0, 0, 1, 1])), ByteTokenizer(), holds_pairs=True
    )
    assert [(one.text, one.answer) for one in segments] == [("pc", "chosen"), ("pr", "rejected")]


def test_a_document_of_one_token_is_shown() -> None:
    ids = [END, *b"a", END, END]
    assert [text for text, _, _ in found(ids[:-1], ids[1:])] == ["", "a", ""]


tokens = st.lists(st.sampled_from([*b"abc", END]), min_size=2, max_size=30)


@given(ids=tokens, ignored=st.lists(st.booleans(), min_size=30, max_size=30))
def test_every_token_is_in_one_segment(ids: list[int], ignored: list[bool]) -> None:
    targets = [-100 if is_ignored else token for token, is_ignored in zip(ids[1:], ignored, strict=False)]
    segments = segments_of((np.array(ids[:-1]), np.array(targets)), ByteTokenizer())
    shown = ids if targets[-1] != -100 else ids[:-1]
    assert sum(one.num_tokens for one in segments) == len(shown)
    assert "".join(one.text for one in segments) == bytes(token for token in shown if token != END).decode()
    assert all(one.is_target is True or one.is_target is False for one in segments)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_any_dtype_of_tokens(dtype: type) -> None:
    segments = segments_of((np.array([97, 98], dtype), np.array([98, 99], dtype)), ByteTokenizer())
    assert [one.text for one in segments] == ["abc"]
