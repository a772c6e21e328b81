"""Questions: which tokens are scored, which choice is an answer, and what is wrong with a file."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.questions.continuation import Continuation, ContinuationEncoder
from meshwright.data.questions.load_questions import load_questions, question_problems
from meshwright.data.questions.question_set import Question, QuestionSet
from meshwright.data.tokenizer import ByteTokenizer, JsonTokenizer
from meshwright.errors import ConfigError, DataError
from meshwright.spec.job.evaluation_section import EvaluationSection

BYTES = ByteTokenizer()
END = BYTES.end_of_text


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_a_continuation_is_what_exceeds_the_context() -> None:
    encode = ContinuationEncoder(BYTES, max_tokens=100)
    assert encode("ab", " c") == Continuation(ids("ab "), ids(" c"))
    # Whitespace at the end of a context belongs to the continuation.
    assert encode("ab\n ", "c") == Continuation(ids("ab\n "), ids("\n c"))
    # Nothing stands before: the token between documents does.
    assert encode("", "xy") == Continuation((END, *ids("x")), ids("xy"))
    assert encode(" ", "xy") == Continuation((END, *ids(" x")), ids(" xy"))


def test_start_ids_stand_before_every_text_and_are_not_scored() -> None:
    encode = ContinuationEncoder(BYTES, max_tokens=100, start=(7,))
    assert encode("a", "bc") == Continuation((7, *ids("ab")), ids("bc"))
    assert encode("", "bc") == Continuation((7, *ids("b")), ids("bc"))


def test_long_contexts_are_cut_off_at_their_beginning() -> None:
    encode = ContinuationEncoder(BYTES, max_tokens=4)
    assert encode("abcdef", "xy") == Continuation(ids("defx"), ids("xy"))
    assert [encode(context, "xy").is_cut for context in ("abcdef", "abcd", "abc")] == [True, True, False]
    assert encode("abcdef", "wxyz") == Continuation(ids("fwxy"), ids("wxyz"))
    with pytest.raises(DataError, match=r"has 5 tokens, more than the 4 that the model reads at once"):
        encode("abcdef", "vwxyz")


def merging_tokenizer(folder: Path) -> JsonTokenizer:
    """Return one that merges a and b."""
    vocab = {"a": 0, "b": 1, "ab": 2, "<|end_of_text|>": 3}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "unk_token": None}
    added = {"id": 3, "content": "<|end_of_text|>", "special": True, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [added], "model": model}))
    return JsonTokenizer(folder / "tokenizer.json")


def test_context_and_continuation_are_encoded_together(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    encode = ContinuationEncoder(merging_tokenizer(tmp_path), max_tokens=9)
    # Together "b ab b", of which the context alone has two tokens.
    assert encode("ba", "bb") == Continuation((1, 0), (1,))
    with pytest.raises(DataError, match="'b' has no token of its own after the context"):
        encode("ba", "b")


@given(text=st.text(max_size=60), max_tokens=st.integers(1, 20))
def test_windows_score_each_token_once_after_as_many_as_fit(text: str, max_tokens: int) -> None:
    windows = ContinuationEncoder(BYTES, max_tokens).windows(text)
    whole = (END, *ids(text))
    assert sum((window.targets for window in windows), ()) == whole[1:]
    scored = 0
    for window in windows:
        scored += len(window.targets)
        assert window.inputs == whole[max(0, scored - max_tokens) : scored]
        assert len(window.targets) <= len(window.inputs) <= max_tokens


def test_the_most_likely_choice_is_the_answer() -> None:
    questions = (Question("a", ("x", "yyyy"), 1), Question("b", ("ää", "zzz"), 0), Question("c", ("1", "2"), 0))
    found = QuestionSet(questions, ()).accuracies([-2.0, -4.0, -3.0, -4.0, -1.0, -1.0])
    # By itself x and ää are more likely; by character yyyy and zzz, by byte yyyy and ää; of equal ones the first.
    assert {name: mean.value for name, mean in found.items()} == {"acc": 2 / 3, "acc_norm": 2 / 3, "acc_bytes": 1.0}
    assert found["acc"].standard_error == pytest.approx(sqrt(2 / 3 * 1 / 3 / 2))


GOOD = {"query": "q", "choices": ["a", "b"], "answer": 1}


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "choices.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((GOOD, "{"), r"choices.jsonl:2 is no JSON"),
        (([1],), r"choices.jsonl:1 is a JSON array, but each line must be an object, such as"),
        (({**GOOD, "query": 3},), r"choices.jsonl:1: query = 3 must be text"),
        (({**GOOD, "choices": ["a"]},), r"choices = \[\"a\"\] must be a list of two or more texts"),
        (({**GOOD, "choices": ["a", ""]},), r"choices = \[\"a\", \"\"\] must be a list of two or more texts"),
        (({**GOOD, "answer": 2},), r"answer = 2 must be the place of the right choice, 0 to 1"),
        (({**GOOD, "answer": True},), r"answer = true must be the place"),
        (({**GOOD, "answer": "b"},), r"answer = \"b\" must be the place"),
        (("", ""), r"has no questions: write one JSON object on each line"),
        (({**GOOD, "choices": ["a", "b" * 90]},), r"choices.jsonl:1: the continuation ' bbb.* has 91 tokens"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, lines: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        QuestionSet.load(write(tmp_path, *lines), ContinuationEncoder(BYTES, max_tokens=40))


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    encoder = ContinuationEncoder(BYTES, max_tokens=40)
    with pytest.raises(DataError, match=r"none.jsonl cannot be read \(No such file"):
        QuestionSet.load(tmp_path / "none.jsonl", encoder)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"binary.jsonl is no UTF-8 text"):
        QuestionSet.load(tmp_path / "binary.jsonl", encoder)


def test_limit_and_delimiter_are_the_jobs(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, GOOD, "not read")
    section = EvaluationSection(source=str(file), limit=2, delimiter="=")
    questions = load_questions(section, "bytes", seq_len=8, vocab_size=257)
    assert len(questions.questions) == 2
    assert [one.targets for one in questions.continuations] == 2 * [ids("=a"), ids("=b")]
    with pytest.raises(ConfigError, match=r"has token 113 by data.tokenizer = 'bytes', but the model has 100 tokens"):
        load_questions(section, "bytes", seq_len=8, vocab_size=100)
    assert question_problems(EvaluationSection(), "bytes", 8, None) == []
    assert question_problems(section.replace(limit=3), "bytes", 8, None)[0].startswith(f"{file}:3 is no JSON")
