"""Everything that would stop a job, found before any process starts; needs no torch."""

import tempfile
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from meshwright.app.job.adapter_job_problems import adapter_job_problems, adapter_shapes
from meshwright.app.job.float8_job_problems import NEEDS_TORCHAO, float8_job_problems
from meshwright.app.job.initial_weights import weight_problems
from meshwright.app.job.object_problems import object_problems
from meshwright.app.job.remote_checkpoints import remote_problems
from meshwright.app.job.tried_fixes import problems_between
from meshwright.config.load import ResolvedJob
from meshwright.data.data_problems import problems as data_problems
from meshwright.data.questions.load_questions import question_problems
from meshwright.errors import MeshwrightError, problems_raised_by
from meshwright.hardware.catalogue import LOCAL, load_device
from meshwright.hardware.choice import named_cluster
from meshwright.hardware.machine import nearest_existing
from meshwright.spec.job.job import SPLIT_SECTIONS, Job
from meshwright.spec.job.rules.optimizer_rules import group_problems
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.layout.schedule.action import read_schedule
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.model.hf.hf_config import hf_obstacles
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.weight_shapes import bias_names, weight_shapes
from meshwright.spec.problem import Problem, distinct
from meshwright.spec.run.run import Run


def check_job(
    resolved: ResolvedJob,
    num_ranks: int | None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    unknown: Collection[str] = (),
    fits: Callable[[Job], bool] | None = None,
) -> list[str]:
    """Return everything that would stop a job on `num_ranks` ranks (None: not known yet), one message each.

    `fits` says whether a job fits its devices' memory: changes with which it does are then preferred.
    Sections that are `unknown`, since something in them was refused, are not compared with others.
    """
    job = resolved.job
    between, of_model = _problems_between(resolved, num_ranks, unknown, fits), _model_problems(resolved)
    # What is known of a model of one's own is between, too, with changes that were tried.
    tried = {problem.what for problem in between if isinstance(problem, Problem)}
    of_model = [problem for problem in of_model if not isinstance(problem, Problem) or problem.what not in tried]
    if _BACKEND in _subjects(of_model):
        # A model that takes no backend has no use for another.
        between = [problem for problem in between if _BACKEND not in _subjects([problem])]
    problems = [
        *between,
        *of_model,
        *_cluster_problems(job),
        *_data_problems(resolved, knows_model="model" not in unknown),
        *question_problems(job.evaluation, job.data.tokenizer, job.train.seq_len, _vocab_size(job)),
        *remote_problems(job, resume=resume),
        *_export_problems(job),
        *_optimizer_problems(job),
        *float8_job_problems(job),
        *adapter_job_problems(job),
        *run_folder_problems(run_folder(resolved), resume=resume, overwrite=overwrite),
    ]
    return [resolved.located(text) for text in distinct(problems)]


_BACKEND = "layout.attention_backend"


def _subjects(problems: Sequence[str]) -> set[str]:
    """Return the keys that `problems` are about."""
    return {problem.subject.rstrip(":") for problem in problems if isinstance(problem, Problem)}


def layout_problems_of(resolved: ResolvedJob, num_ranks: int) -> list[str]:
    """Return why the job's layout cannot run on `num_ranks` ranks, one message each: each rank can ask by itself."""
    return [resolved.located(text) for text in distinct(_problems_between(resolved, num_ranks, ("cluster",)))]


def run_folder(resolved: ResolvedJob) -> Run:
    """Return the run folder of a job, whether it exists or not."""
    return Run(resolved.run_dir)


def run_folder_problems(run: Run, *, resume: bool, overwrite: bool) -> list[str]:
    """Return why a run folder cannot be used: existing folders need --resume or --overwrite."""
    folder = run.folder
    if resume and overwrite:
        return ["--resume continues the run folder and --overwrite replaces it: give one of them"]
    if folder.exists() and not folder.is_dir():
        return [f"run.dir = {str(folder)!r} is a file: set run.dir to a new folder"]
    refusal = _refusal_to_write(nearest_existing(folder))
    if refusal is not None:
        return [f"run.dir = {str(folder)!r}: {refusal}: change that, or set another run.dir"]
    if not folder.exists() or not any(folder.iterdir()):
        return []
    if not run.manifest.exists():
        return _problems_without_manifest(run, overwrite=overwrite)
    if resume or overwrite:
        return []
    steps = run.checkpoint_steps()
    held = f"a run with a checkpoint after step {steps[-1]}" if steps else "a run without a checkpoint"
    return [
        f"run.dir = {str(folder)!r} already holds {held}: "
        "continue with --resume, replace it with --overwrite, or set another run.dir"
    ]


def _problems_without_manifest(run: Run, *, overwrite: bool) -> list[str]:
    """Return why a folder with files but no manifest cannot be used: only what a run has left there may be replaced."""
    held, given = {path.name for path in run.folder.iterdir()}, f"run.dir = {str(run.folder)!r} holds"
    if held <= run.names_of_a_start and not run.checkpoint_steps():
        return []  # a start that failed before it became a run
    # A run makes its checkpoints' folder first; a job.toml alone is the user's.
    if not held <= run.names_of_a_run or run.checkpoints.name not in held:
        return [f"{given} files but no run (no manifest.json): set run.dir to a new folder"]
    if overwrite:
        return []
    return [
        f"{given} what a run has left, but no manifest.json, which says what it was: put that back, replace the folder "
        "with --overwrite, or set another run.dir"
    ]


def _model_problems(resolved: ResolvedJob) -> list[str]:
    section = resolved.job.model
    problems = problems_raised_by(lambda: resolve_architecture(section))
    if is_object_source(section.source):
        problems += object_problems("model", section, resolved.folder, resolved.job)
    problems += weight_problems(section)
    return problems


def _export_problems(job: Job) -> list[str]:
    """Return why checkpoints cannot be exported, which each of them would otherwise find out."""
    section = job.checkpoint
    if section.export == "none" or problems_raised_by(lambda: resolve_architecture(job.model)):
        return []
    architecture = resolve_architecture(job.model)
    given = f"checkpoint.export = {section.export!r}"
    advice = 'set it to "none"'
    # Whether a class has a table is read with the rest of its definition.
    if architecture is not None and (obstacles := hf_obstacles(architecture)):
        return [f"{given}, but transformers has no model with {' and '.join(obstacles)}: {advice}"]
    return []


def _optimizer_problems(job: Job) -> list[str]:
    """Return why the optimizer cannot be built: an extra that is missing, patterns that match no parameter."""
    problems: list[str] = []
    if job.optimizer.state_dtype == "int8" and find_spec("torchao") is None:
        problems.append(f'optimizer.state_dtype = "int8" {NEEDS_TORCHAO}, or set it to "bfloat16"')
    if not job.optimizer.groups or problems_raised_by(lambda: resolve_architecture(job.model)):
        return problems
    # The parameters of a class of the user's own are known once it is built.
    if (architecture := resolve_architecture(job.model)) is not None:
        names = [*weight_shapes(architecture), *bias_names(architecture)]
        trained = [*adapter_shapes(job.adapter, architecture)] if job.adapter.freezes_base else names
        # Patterns of layers that match none are reported already.
        problems += group_problems(job.optimizer, trained) if trained else []
    return problems


def _problems_between(
    resolved: ResolvedJob,
    num_ranks: int | None,
    unknown: Collection[str] = (),
    fits: Callable[[Job], bool] | None = None,
) -> list[str]:
    """Return what is wrong between the job's fields on `num_ranks` ranks, and with a schedule's file."""
    job = resolved.job
    problems: list[str] = [*problems_between(resolved, num_ranks, unknown, fits)]
    is_open = job.layout.search or (num_ranks is None and job.layout.rest_axis is not None)
    if problems or is_open or SPLIT_SECTIONS.intersection(unknown):
        return problems
    # A schedule's file is read for a layout that could run it.
    layout = job.layout.resolve(num_ranks or job.layout.num_ranks)
    return problems_raised_by(lambda: build_schedule(layout, job.num_microbatches(layout), read_schedule(layout)))


def _cluster_problems(job: Job) -> list[str]:
    section, problems = job.cluster, []
    device = section.device
    if device is not None:
        problems += [f"cluster.device: {text}" for text in problems_raised_by(lambda: load_device(device))]
    if section.name == LOCAL:
        return problems
    return [*problems, *(f"cluster.name: {text}" for text in problems_raised_by(lambda: named_cluster(section.name)))]


def _data_problems(resolved: ResolvedJob, *, knows_model: bool) -> list[str]:
    job = resolved.job
    if is_object_source(job.data.source):
        return object_problems("data", job.data, resolved.folder)
    try:
        architecture = resolve_architecture(job.model) if knows_model else None
    except MeshwrightError:
        architecture = None  # reported by _model_problems
    vocab_size = architecture.vocab_size if architecture else None
    return data_problems(job.data, job.train.seq_len, vocab_size, job.train.task)


def _vocab_size(job: Job) -> int | None:
    """Return the tokens that the model knows; None where that is not known, such as of a class of the user's."""
    try:
        architecture = resolve_architecture(job.model)
    except MeshwrightError:
        return None  # reported by _model_problems
    return architecture.vocab_size if architecture else None


def _refusal_to_write(folder: Path) -> str | None:
    """Return why nothing can be written in `folder`, by writing a file that has no name and is gone at once."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} takes no new files ({error.strerror})"
