"""From a job file and overrides to a Job, with where each value came from and everything that is wrong at once."""

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.config.key_problems import KeyProblem, apply_overrides, problems_of
from meshwright.config.keys import SECTIONS, job_keys
from meshwright.config.paths import searched, with_paths_of
from meshwright.config.positions import KeyPath, key_lines
from meshwright.errors import ConfigError, problems_raised_by
from meshwright.spec.job.job import Job
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.problem import Fix, Problem, override_of
from meshwright.spec.run.run import Run
from meshwright.units import parse_count

DEFAULT = "default"
COMMAND_LINE = "command line"

_KEY_IN_TEXT = re.compile(rf"\b({'|'.join(SECTIONS)})\.([a-z_]+)\b")


@dataclass(frozen=True, repr=False)
class ResolvedJob:
    """A job and where it came from."""

    job: Job
    origins: dict[str, str]
    """Where each value came from, by dotted key: "default", "FILE:LINE" or "command line"."""
    path: Path
    """The job file, as it was named."""
    overrides: tuple[str, ...] = ()
    """section.key=value, as they were given."""

    def __repr__(self) -> str:
        return f"<Job {' '.join((str(self.path), *self.overrides))}: {self.job.model.source}>"

    @property
    def folder(self) -> Path:
        """Return the job file's folder: modules that the job names are looked for here and in the working directory."""
        return self.path.parent

    @property
    def leaves_compile_open(self) -> bool:
        """Return whether the device decides what is compiled: layout.compile is "auto", or the job leaves it out."""
        layout = self.job.layout
        return layout.compile == "auto" or not (
            layout.search or layout.compile or self.origins.get("layout.compile", DEFAULT) != DEFAULT
        )

    @property
    def judged(self) -> Job:
        """Return the job as its rules judge it.

        With layout.async_tp, which needs compiled blocks, a layout.compile that is left out is "auto", as it means;
        but not where run.device says that nothing is compiled by default.
        """
        layout = self.job.layout
        if not layout.async_tp or not self.leaves_compile_open or self.job.run.device == "cpu":
            return self.job
        return self.job.replace(layout=layout.replace(compile="auto"))

    @property
    def run_dir(self) -> Path:
        """Return the run folder: run.dir, or runs/NAME for a job file NAME.toml; relative to the working directory."""
        return Path(os.path.expanduser(self.job.run.dir)) if self.job.run.dir else Path("runs") / self.path.stem

    def located(self, text: str) -> str:
        """Return a message after the place of the first key in it that the user set, or else the file's name."""
        # Advice may name keys that were set elsewhere.
        keys = keys_in(text.what if isinstance(text, Problem) else text) or keys_in(text)
        origins = [self.origins.get(".".join(path), DEFAULT) for path in keys]
        given = [origin for origin in origins if origin != DEFAULT]
        if not origins:
            return text
        where = given[0] if given else str(self.path)
        note = "" if where == COMMAND_LINE else searched(self.folder, self.job, keys[0])
        return text.at(where, note) if isinstance(text, Problem) else f"{where}: {text}{note}"


@dataclass(frozen=True)
class Inspection:
    """What could be read of a job, and all that is wrong with it by itself."""

    resolved: ResolvedJob
    """The job; keys that are wrong stand at their defaults."""
    problems: list[str]
    """One message for each thing that is wrong, in the order of the file."""
    wrong: frozenset[str]
    """Sections and dotted keys whose values are not what was meant: what follows from them would mislead."""

    def is_about_wrong(self, text: str) -> bool:
        """Return whether a message speaks of a key that is wrong."""
        return any(self.wrong.intersection((path[0], ".".join(path))) for path in keys_in(text))

    @property
    def unknown(self) -> frozenset[str]:
        """Return the sections that are not what was meant: what follows from them together is not judged."""
        return frozenset(name.partition(".")[0] for name in self.wrong)


def load_job(path: Path | str, overrides: Sequence[str] = ()) -> ResolvedJob:
    """Return the job of a file, or of a run folder, with `section.key=value` overrides.

    Raises one ConfigError with all that is wrong.
    """
    inspection = inspect_job(path, overrides)
    raise_problems(inspection.resolved.path, inspection.problems)
    return inspection.resolved


def inspect_job(path: Path | str, overrides: Sequence[str] = ()) -> Inspection:
    """Return the parts of the job that can be read; raises ConfigError only for a file that cannot be read at all.

    A run folder is its job.toml, with run.dir = the folder itself, which may have been moved.
    """
    file, run = Path(path), Run(path)
    if run.manifest.is_file() and run.job.is_file():
        file, overrides = run.job, (f"run.dir={run.folder}", *overrides)
    return inspect_text(file, _read(file), overrides)


def inspect_text(path: Path, text: str, overrides: Sequence[str] = ()) -> Inspection:
    """Return the job of a file's text; an empty text leaves all to the overrides."""
    values = _parse(path, text)
    lines = key_lines(text)
    overridden, problems = apply_overrides(values, overrides)
    place = _Place(path, lines, set(overridden))
    _convert_counts(values)
    job, value_problems = _salvage(values)
    job = with_paths_of(path.parent, job, place.is_in_file)
    problems = sorted([*problems, *value_problems], key=place.order)
    inspection = Inspection(
        ResolvedJob(job, place.origins(job), path, tuple(overrides)),
        [f"{place.name(problem)}: {problem.text}" for problem in problems],
        frozenset(name for problem in problems for name in _names_in(problem)),
    )
    of_model = problems_raised_by(lambda: resolve_architecture(job.model))
    texts = [*inspection.resolved.judged.problems_on_any_ranks(inspection.unknown), *of_model]
    inspection.problems.extend(
        inspection.resolved.located(text) for text in texts if not inspection.is_about_wrong(text)
    )
    return inspection


def keys_in(text: str) -> list[KeyPath]:
    """Return the keys that a message names, in its order."""
    return [found.groups() for found in _KEY_IN_TEXT.finditer(text)]


def raise_problems(source: Path | str, problems: Sequence[str], together: Fix | None = None) -> None:
    """Raise one ConfigError that lists `problems`, numbered when there are several; return when there are none.

    `source` is what has them, such as a file. `together` are changes after which none of several is left.
    """
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        numbered = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, start=1))
        solved = f"\n  all at once: {override_of(together)}" if together else ""
        error = ConfigError(f"{source} has {len(problems)} problems:{numbered}{solved}")
        error.listed = problems
        raise error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        what = "job file" if path.suffix else "job file or run folder"
        raise ConfigError(f"there is no {what} {path}: {_nearest_file(path)}") from None
    except IsADirectoryError:
        jobs = sorted(path.glob("*.toml"))
        advice = f"name a job file in it, such as {jobs[0]}" if jobs else "name a job file or a run folder"
        raise ConfigError(f"{path} is a folder without a run: {advice}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text (byte {error.start}): save the job file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check its permissions") from None


def _nearest_file(path: Path) -> str:
    if str(path) in PRESETS:
        return (
            f"{path} is a model: plan for it with `meshwright plan --model {path}`, or write a job with "
            f"`meshwright init {path} --out job.toml`"
        )
    siblings = [sibling.name for sibling in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    close = get_close_matches(path.name, siblings, n=1, cutoff=0.5)
    if close:
        return f"did you mean {path.with_name(close[0])}?"
    return f"`meshwright init MODEL --out {path}` writes one" if path.suffix else "name one that exists"


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_text(path, text, str(error))) from None


def _syntax_text(path: Path, text: str, message: str) -> str:
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.DOTALL)
    reason = found[1] if found else message
    if found is None or found[2] is None:
        return f"{path}: the file ends in the middle of something: {reason}: close what is open, or remove it"
    line, column = int(found[2]), int(found[3])
    written = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else ""
    fix = 'write key = value, with "quotes" around text'
    if "overwrite" in reason or "twice" in reason:
        reason, fix = "this key or section is set above", "remove one of the two"
    return f"{path}:{line}:{column}: {written!r} is not TOML: {reason[:1].lower()}{reason[1:]}: {fix}"


def _convert_counts(values: dict[str, Any]) -> None:
    """Turn "4M" into 4_000_000 for keys that count tokens; what is no count stays for the key's rule to refuse."""
    for key in job_keys().values():
        section = values.get(key.section)
        if key.is_count and isinstance(section, dict) and isinstance(section.get(key.name), str):
            try:
                section[key.name] = parse_count(section[key.name])
            except ValueError:
                continue


def _salvage(values: dict[str, Any]) -> tuple[Job, list[KeyProblem]]:
    """Return the job without the keys that are wrong, and what is wrong with them.

    Several rounds, because a section's own checks run only once each of its keys is right.
    """
    problems: list[KeyProblem] = []
    while True:
        try:
            return Job.model_validate(values), problems
        except ValidationError as error:
            problems += problems_of(error, values)
            for detail in error.errors():
                _drop(values, detail["loc"])


def _drop(values: dict[str, Any], path: tuple[int | str, ...]) -> None:
    section, *rest = path
    inner = values.get(str(section))
    if rest and isinstance(inner, dict):
        inner.pop(str(rest[0]), None)
    else:
        values.pop(str(section), None)


def _names_in(problem: KeyProblem) -> Iterator[str]:
    """Yield what is not known because of a problem: its own key, the key that was meant, or a whole section."""
    yield ".".join(problem.path[:2])
    yield from map(".".join, keys_in(problem.text))
    yield problem.meant_section
    if problem.path == ("train", "global_batch_tokens"):
        yield "train.global_batch_size"  # its default counts where the tokens are not known


class _Place:
    """Where a key was written."""

    def __init__(self, path: Path, lines: dict[KeyPath, int], overridden: set[KeyPath]) -> None:
        self._path, self._lines, self._overridden = path, lines, overridden

    def origin(self, path: KeyPath) -> str:
        """Return "command line", "FILE:LINE" or "default"."""
        if any(given[: len(path)] == path for given in self._overridden):
            return COMMAND_LINE
        return f"{self._path}:{self._lines[path]}" if path in self._lines else DEFAULT

    def is_in_file(self, dotted: str) -> bool:
        """Return whether the file says the value of a key, and no override does."""
        return self.origin(tuple(dotted.split("."))) not in (COMMAND_LINE, DEFAULT)

    def origins(self, job: Job) -> dict[str, str]:
        """Return the origin of every key of `job`, and of every option by itself."""
        found = {dotted: self.origin(tuple(dotted.split("."))) for dotted in job_keys()}
        for section, options in (("model", job.model.options), ("data", job.data.options)):
            found |= {f"{section}.options.{name}": self.origin((section, "options", name)) for name in options}
        return found

    def name(self, problem: KeyProblem) -> str:
        """Return where to look: the key's own line, or its section's, or the file, or the command line."""
        if self._is_overridden(problem):
            return COMMAND_LINE
        line = self._line(problem.path)
        return f"{self._path}:{line}" if line else str(self._path)

    def order(self, problem: KeyProblem) -> tuple[bool, int]:
        """Return the sort key of problems: lines of the file in order, then the command line."""
        return self._is_overridden(problem), self._line(problem.path)

    def _is_overridden(self, problem: KeyProblem) -> bool:
        path = problem.path
        return problem.is_override or any(given[: len(path)] == path for given in self._overridden if path)

    def _line(self, path: KeyPath) -> int:
        """Return the line of `path` or of the table around it, 0 when the file does not say it."""
        prefixes = (path[:length] for length in range(len(path), 0, -1))
        return next((self._lines[prefix] for prefix in prefixes if prefix in self._lines), 0)
