"""Run tasks of lm-evaluation-harness (the extra eval) on a loaded model."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.data.questions.continuation import ContinuationEncoder
from meshwright.errors import ConfigError, DataError
from meshwright.extras import import_extra
from meshwright.inference.loaded_model import LoadedModel

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
    num_questions: int | None
    """None of a group of tasks."""


def run_harness(
    loaded: LoadedModel, encoder: ContinuationEncoder, tasks: Sequence[str], options: HarnessOptions
) -> list[TaskMeasure]:
    """Return what lm_eval measures on `tasks`, each the name of a task or group, or a YAML file of one.

    Raises UnsupportedError where lm_eval is not installed, ConfigError for an unknown task,
    DataError where its data cannot be read.
    """
    library = import_extra("lm_eval", HARNESS_PURPOSE)
    # That module imports lm_eval itself.
    model_class = import_module("meshwright.inference.harness_model").HarnessModel
    manager = import_module("lm_eval.tasks").TaskManager()
    for task in tasks:
        _require_task(task, manager.all_tasks)
    try:
        found = library.simple_evaluate(
            model=model_class(loaded, encoder, options.batch_size),
            tasks=list(tasks),
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            log_samples=False,
            task_manager=manager,
        )
    except OSError as error:
        raise DataError(
            f"the data of --tasks {','.join(tasks)} cannot be read ({error}): data of the hub is downloaded, which "
            "takes a network; files are looked for in the working directory"
        ) from error
    return list(_measures(found))


def _require_task(task: str, known: Sequence[str]) -> None:
    """Raise ConfigError for a name that is neither known nor a file."""
    if task in known or Path(task).is_file():
        return
    close = get_close_matches(task, known, n=3)
    advice = f"did you mean {' or '.join(close)}?" if close else "`lm_eval ls tasks` lists them"
    raise ConfigError(f"--tasks {task}: neither a file nor a task of lm-evaluation-harness: {advice}")


def _measures(found: Mapping[str, Any]) -> Iterator[TaskMeasure]:
    for task, values in found["results"].items():
        count = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in values.items():
            name, _, filter_name = key.partition(",")
            if not filter_name or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{name}_stderr,{filter_name}")
            shown = name if filter_name == "none" else f"{name},{filter_name}"
            yield TaskMeasure(task, shown, float(value), float(error) if isinstance(error, int | float) else nan, count)
