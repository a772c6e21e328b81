"""evaluate: how well a model does on tasks, by the log-likelihoods of continuations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from meshwright.app.arguments import NotNegative, Positive, checked
from meshwright.app.progress import elapsed
from meshwright.app.results.result import Result
from meshwright.checkpoint.format.find_checkpoint import is_hugging_face
from meshwright.checkpoint.saved_model import find_saved_model
from meshwright.data.questions.continuation import ContinuationEncoder
from meshwright.data.questions.question_set import QUESTION_SUFFIXES, QuestionSet
from meshwright.errors import ConfigError
from meshwright.extras import import_extra
from meshwright.inference.harness_run import HARNESS_PURPOSE, HarnessOptions, TaskMeasure, run_harness
from meshwright.inference.loaded_model import LoadedModel, load_model
from meshwright.inference.log_likelihood import log_likelihoods
from meshwright.models.gpt2 import GPT2
from meshwright.pages.tables.page_table import PageTable
from meshwright.spec.model.hf.hub_cache import local_path
from meshwright.units import counted


@dataclass(frozen=True, repr=False)
class Evaluation(Result):
    """What a model reached on tasks. Data frame: one row for each number."""

    origin: Path
    """Checkpoint or Hugging Face folder of the weights."""
    max_tokens: int
    """Tokens that the model read at most."""
    measures: tuple[TaskMeasure, ...]

    def to_json(self) -> str:
        """Return what `meshwright evaluate --json` prints; a standard error that is unknown is null."""
        rows = [{name: _known(value) for name, value in row.items()} for row in self._rows()]
        return json.dumps({"origin": str(self.origin), "max_tokens": self.max_tokens, "measures": rows}, indent=2)

    def _summary(self) -> str:
        tasks = dict.fromkeys(one.task for one in self.measures)
        return f"Evaluation of {self.origin} on {', '.join(tasks)}"

    def _page(self) -> Iterator[RenderableType]:
        yield Text(f"{self.origin}, reading {counted(self.max_tokens, 'token')} at most")
        table = PageTable("task", "measure", "value#", "standard error#", "questions#")
        for one in self.measures:
            error = f"{one.standard_error:.4f}" if isfinite(one.standard_error) else "-"
            count = "-" if one.num_questions is None else str(one.num_questions)
            table.add_row(escape(one.task), escape(one.measure), f"{one.value:.4f}", error, count)
        yield table

    def _rows(self) -> list[dict[str, Any]]:
        return [one._asdict() for one in self.measures]


@checked
def evaluate(
    source: Path | str,
    tasks: Sequence[str],
    *,
    step: NotNegative | None = None,
    limit: Positive | None = None,
    num_fewshot: NotNegative | None = None,
    batch_size: Positive = 8,
    max_tokens: Positive | None = None,
    delimiter: str = " ",
) -> Evaluation:
    """Return what the model in `source`, a run, a checkpoint or a Hugging Face folder, reaches on `tasks`.

    A task is a JSONL file of questions, or with the extra eval the name of a task of lm-evaluation-harness or a YAML
    file of one. Of each task the first `limit` questions are asked, `batch_size` rows at once. `max_tokens` is what the
    model reads at most, by default train.seq_len of a run and the context length of other models. `num_fewshot` is of
    lm-evaluation-harness, `delimiter` of JSONL files. Raises DataError for a file that holds no questions,
    UnsupportedError without the extra.
    """
    own = [task for task in tasks if task.endswith(QUESTION_SUFFIXES)]
    others = [task for task in tasks if task not in own]
    if not tasks or (own and num_fewshot):
        what = "--num-fewshot is of lm-evaluation-harness" if tasks else "there is no task"
        raise ConfigError(f"{what}: name tasks of it, files of one, or JSONL files of questions without examples")
    if others:
        import_extra("lm_eval", HARNESS_PURPOSE)
    with elapsed(f"evaluating {source}"):
        loaded = load_model(Path(source), step)
        encoder = _encoder(loaded, max_tokens or _trained_tokens(Path(source), step, loaded))
        sets = {task: QuestionSet.load(Path(task), encoder, limit=limit, delimiter=delimiter) for task in own}
        measures = [one for task, questions in sets.items() for one in _answered(loaded, questions, task, batch_size)]
        if others:
            measures += run_harness(loaded, encoder, others, HarnessOptions(batch_size, limit, num_fewshot))
    return Evaluation(loaded.origin, encoder.max_tokens, tuple(measures))


def _answered(loaded: LoadedModel, questions: QuestionSet, task: str, batch_size: int) -> Iterator[TaskMeasure]:
    values = [one.value for one in log_likelihoods(loaded.model, questions.continuations, batch_size)]
    for name, mean in questions.accuracies(values).items():
        yield TaskMeasure(task, name, mean.value, mean.standard_error, len(questions.questions))


def _encoder(loaded: LoadedModel, max_tokens: int) -> ContinuationEncoder:
    """Return the encoder of a model's texts; raises ConfigError without a tokenizer, or for too many tokens."""
    loaded.encode_prompt("")
    assert loaded.tokenizer is not None
    longest = loaded.model.architecture.max_seq_len
    if isinstance(loaded.model, GPT2) and max_tokens > longest:
        raise ConfigError(
            f"--max-tokens {max_tokens} is more than the model's max_seq_len = {longest}, the rows of its position "
            f"embedding: set it to {longest} or less"
        )
    return ContinuationEncoder(loaded.tokenizer, max_tokens, loaded.start)


def _trained_tokens(source: Path, step: int | None, loaded: LoadedModel) -> int:
    """Return the context length of a model: what its run trained with, else what its config says."""
    if not is_hugging_face(local_path(str(source))):
        saved = find_saved_model(source, step)
        if not saved.is_imported:
            return saved.job.train.seq_len
    return loaded.model.architecture.max_seq_len


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value
