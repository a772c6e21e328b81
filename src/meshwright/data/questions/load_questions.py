"""The questions of a job's [evaluation], as its model reads them, and what is wrong with them."""

from pathlib import Path

from meshwright.data.questions.continuation import ContinuationEncoder
from meshwright.data.questions.question_set import QuestionSet
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import ConfigError, problems_raised_by
from meshwright.spec.job.evaluation_section import EvaluationSection

_NUM_CHECKED = 500
"""Questions that are checked before any process starts; training checks the rest, with the same messages."""


def load_questions(section: EvaluationSection, tokenizer: str, seq_len: int, vocab_size: int | None) -> QuestionSet:
    """Return the questions of evaluation.source, whose rows have at most `seq_len` inputs.

    `tokenizer` is data.tokenizer, `vocab_size` the model's where it is known. Raises DataError about the file or the
    tokenizer, ConfigError for tokens that the model lacks.
    """
    assert section.source is not None, "there are no questions"
    encoder = ContinuationEncoder(load_tokenizer(tokenizer), seq_len)
    questions = QuestionSet.load(Path(section.source), encoder, limit=section.limit, delimiter=section.delimiter)
    largest = max(max(*one.inputs, *one.targets) for one in questions.continuations)
    if vocab_size is not None and largest >= vocab_size:
        raise ConfigError(
            f"evaluation.source = {section.source!r} has token {largest} by data.tokenizer = {tokenizer!r}, but the "
            f"model has {vocab_size} tokens: set data.tokenizer to the model's own"
        )
    return questions


def question_problems(section: EvaluationSection, tokenizer: str, seq_len: int, vocab_size: int | None) -> list[str]:
    """Return why the first questions of a job cannot be asked, one message at most; [] where none are named."""
    if section.source is None:
        return []
    first = section.replace(limit=min(section.limit or _NUM_CHECKED, _NUM_CHECKED))
    return problems_raised_by(lambda: load_questions(first, tokenizer, seq_len, vocab_size))
