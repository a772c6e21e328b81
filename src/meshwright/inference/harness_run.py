"""Run tasks of lm-evaluation-harness (the extra eval) on a loaded model."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from math import nan
from typing import Any, NamedTuple

from meshwright.data.questions.continuation import ContinuationEncoder
from meshwright.errors import ConfigError
from meshwright.extras import import_extra
from meshwright.inference.loaded_model import LoadedModel
from meshwright.log import progress

HARNESS_PURPOSE = "evaluation on tasks of lm-evaluation-harness"


class HarnessOptions(NamedTuple):
    """How tasks are run."""

    batch_size: int
    """Rows that are computed at once."""
    limit: int | None
    """Documents of each task, the first ones; None for all."""
    num_fewshot: int | None
    """Examples before each question; None for the task's own number."""


class TaskMeasure(NamedTuple):
    """One number of a task."""

    task: str
    measure: str
    """Such as acc; with a filter of the task's its name, too: exact_match,strict-match."""
    value: float
    standard_error: float
    """nan where lm_eval computes none."""
    num_questions: int


def run_harness(
    loaded: LoadedModel, encoder: ContinuationEncoder, tasks: Sequence[str], options: HarnessOptions
) -> list[TaskMeasure]:
    """Return what lm_eval measures on `tasks`, each the name of a task or group, or a YAML file of one.

    Raises UnsupportedError where lm_eval is not installed, ConfigError for an unknown task.
    """
    library = import_extra("lm_eval", HARNESS_PURPOSE)
    # That module imports lm_eval itself.
    model_class = import_module("meshwright.inference.harness_model").HarnessModel
    harness = logging.getLogger("lm_eval")
    # Its warnings are about model classes of its own.
    harness.setLevel(max(progress.getEffectiveLevel(), logging.ERROR))
    try:
        found = library.simple_evaluate(
            model=model_class(loaded, encoder, options.batch_size),
            tasks=list(tasks),
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            log_samples=False,
        )
    except KeyError as error:
        raise ConfigError(f"--tasks {','.join(tasks)}: {error.args[0]}: see `lm_eval ls tasks`") from error
    return list(_measures(found))


def _measures(found: Mapping[str, Any]) -> Iterator[TaskMeasure]:
    for task, values in found["results"].items():
        count = found.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in values.items():
            name, _, filter_name = key.partition(",")
            if not filter_name or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{name}_stderr,{filter_name}")
            shown = name if filter_name == "none" else f"{name},{filter_name}"
            yield TaskMeasure(task, shown, float(value), float(error) if isinstance(error, int | float) else nan, count)
