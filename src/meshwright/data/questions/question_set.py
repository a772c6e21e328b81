"""Questions of a JSONL file, and how many a model answers right by the log-likelihoods of their choices.

The measures are lm-evaluation-harness's of the same names: of a question's choices the most likely one is the answer,
where likelihood counts as it is (acc), by character of the choice (acc_norm) or by its UTF-8 byte (acc_bytes).
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshwright.data.formats.document_form import json_kind
from meshwright.data.questions.continuation import Continuation, ContinuationEncoder
from meshwright.errors import DataError

QUESTION_SUFFIXES = (".jsonl", ".ndjson")
"""What names of files of questions end in."""
_FIELDS = 'such as {"query": "The sky is", "choices": ["blue", "wet"], "answer": 0}'


@dataclass(frozen=True)
class Question:
    """A query with its choices."""

    query: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right choice, from 0."""


@dataclass(frozen=True)
class Mean:
    """A mean over questions."""

    value: float
    standard_error: float
    """Of the sample; nan for a single question."""


@dataclass(frozen=True)
class QuestionSet:
    """Questions with the continuations to score, choice by choice."""

    questions: tuple[Question, ...]
    continuations: tuple[Continuation, ...]
    """Of all choices of the first question, then of the second one, ..."""

    @classmethod
    def load(cls, path: Path, encoder: ContinuationEncoder, *, limit: int | None = None, delimiter: str = " ") -> Self:
        """Return the first `limit` questions of a file; raises DataError, which names the line."""
        questions, continuations = [], []
        for where, question in read_questions(path, limit):
            questions.append(question)
            try:
                continuations += [encoder(question.query, f"{delimiter}{choice}") for choice in question.choices]
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
        return cls(tuple(questions), tuple(continuations))

    def accuracies(self, log_likelihoods: Sequence[float]) -> dict[str, Mean]:
        """Return acc, acc_norm and acc_bytes from the log-likelihood of each continuation."""
        right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
        values = iter(log_likelihoods)
        for question in self.questions:
            own = np.array([next(values) for _ in question.choices])
            lengths = {
                "acc": np.ones(len(own)),
                "acc_norm": np.array([len(choice) for choice in question.choices]),
                "acc_bytes": np.array([len(choice.encode()) for choice in question.choices]),
            }
            for name, length in lengths.items():
                right[name].append(int((own / length).argmax()) == question.answer)
        return {name: _mean(flags) for name, flags in right.items()}


def read_questions(path: Path, limit: int | None = None) -> Iterator[tuple[str, Question]]:
    """Yield the questions of a JSONL file with their places; raises DataError for another file, and for none."""
    count = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and count != limit:
                    count += 1
                    yield f"{path}:{number}", _question(f"{path}:{number}", line)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): name a JSONL file of questions") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}): convert it") from error
    if not count:
        raise DataError(f"{path} has no questions: write one JSON object on each line, {_FIELDS}")


def _question(where: str, line: str) -> Question:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON ({error}): write one object on each line, {_FIELDS}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is a JSON {json_kind(record)}, but each line must be an object, {_FIELDS}")
    query, choices, answer = record.get("query"), record.get("choices"), record.get("answer")
    if not isinstance(query, str):
        raise DataError(_wrong(where, "query", query, "be text"))
    if not isinstance(choices, list) or len(choices) < 2 or not all(_is_text(choice) for choice in choices):
        raise DataError(_wrong(where, "choices", choices, "be a list of two or more texts that are not empty"))
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(_wrong(where, "answer", answer, f"be the place of the right choice, 0 to {len(choices) - 1}"))
    return Question(query, tuple(choices), answer)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _wrong(where: str, name: str, value: Any, rule: str) -> str:
    return f"{where}: {name} = {json.dumps(value)[:80]} must {rule}: correct or remove the line, {_FIELDS}"


def _mean(flags: Sequence[bool]) -> Mean:
    value, count = sum(flags) / len(flags), len(flags)
    return Mean(value, math.sqrt(value * (1 - value) / (count - 1)) if count > 1 else math.nan)
