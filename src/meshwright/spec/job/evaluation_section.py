"""[evaluation]: multiple-choice questions that a run answers while it trains."""

from collections.abc import Iterator

from pydantic import Field, NonNegativeInt, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.problem import Problem, shown_value

_OF_QUESTIONS = ("interval", "limit", "delimiter")


class EvaluationSection(Frozen):
    """Which multiple-choice questions a run answers, and how often."""

    source: str | None = Field(None, examples=["choices.jsonl"])
    """A JSONL file of questions { query, choices, answer }, answer counted from 0; default: none are asked."""
    interval: NonNegativeInt = 0
    """Steps between two evaluations; one follows the last step in any case."""
    limit: PositiveInt | None = Field(None, examples=[200])
    """Questions to ask, the first ones of the file; default: all."""
    delimiter: str = " "
    """Text between a query and each of its choices, scored with the choice."""


def evaluation_problems(section: EvaluationSection) -> Iterator[Problem]:
    """Yield keys that do nothing without questions."""
    for name in _OF_QUESTIONS if section.source is None else ():
        value, default = getattr(section, name), EvaluationSection.model_fields[name].default
        if value != default:
            yield Problem(
                f"evaluation.{name} = {shown_value(value)} does nothing without evaluation.source, which names the "
                "file of questions",
                [{f"evaluation.{name}": default}],
                after=", or evaluation.source to a JSONL file",
            )
