"""prove: whether layouts train what one process trains, on local ranks."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from rich.console import RenderableType
from rich.text import Text

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.cuda import require_cuda
from meshwright.app.job.jobs import as_job
from meshwright.app.job.object_problems import object_problems
from meshwright.app.results.result import Result, viewed
from meshwright.config.load import ResolvedJob, raise_problems
from meshwright.errors import ConfigError
from meshwright.prover.table import changes_text, notes, proof_table, reasons
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.layout.covering import covering_layouts
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.layout.layout_text import layout_text, parse_layout
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.proof import LayoutProof, PlantedAxis, Proof, ProofPrecision
from meshwright.units import counted


class ProofResult(Result, Proof):
    """A proof with its views. Data frame: a row for each layout."""

    def _summary(self) -> str:
        wrong = sum(not one.holds for one in self.layouts)
        outcome = f"{wrong} of {counted(len(self.layouts), 'layout')} do not hold"
        if not wrong:
            outcome = f"{counted(len(self.layouts), 'layout')}, all hold"
        return f"Proof {self.job.model.source}: {outcome}, {counted(self.num_steps, 'step')} in {self.precision}"

    def _page(self) -> Iterator[RenderableType]:
        yield proof_table(self)
        yield ""
        for line in (*notes(self), changes_text(self)):
            yield Text(line, style="dim")

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "layout": layout_text(one.layout),
                "num_ranks": one.layout.num_ranks,
                "holds": one.holds,
                **{difference.kind: difference.relative for difference in one.differences},
                "share_of_bar": None if one.worst is None else one.worst.share,
                "reasons": reasons(one),
                "took_s": one.took_s,
            }
            for one in self.layouts
        ]

    def _piped_width(self) -> int:
        return proof_table(self).natural_width


Report = Callable[[LayoutProof], None]


@checked
def prove(
    job: JobSource,
    *words: Layout | str,
    steps: Positive = 3,
    precision: ProofPrecision = "float32",
    repeat: bool = False,
    plant: PlantedAxis | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    timeout_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 300.0,
    max_ranks: Positive = 64,
    report: Report = lambda _: None,
) -> ProofResult:
    """Return how each layout of `words`, such as "dp_shard=2,tp=2", compares with one process.

    Words such as "model.options.qk_norm=true" set keys of the job, as for `train`, but for [layout]. The model of `job`
    is made small, its architecture kept. Without layouts a set is proven in which every pair of axes is used together.
    `precision` is what is computed in: "float64" leaves no rounding to hide a mistake. `repeat` runs
    each layout twice, `plant` breaks an axis, which must be found, and `report` is called with each layout's result.
    Raises ConfigError for a layout that does not fit the job.
    """
    layouts, overrides = split_words(words)
    resolved = as_job(job, overrides)
    from meshwright.prover.prove import ProofRequest
    from meshwright.prover.prove import prove as _prove

    # A module that the job names may lie next to the job file.
    sys.path.insert(0, str(resolved.folder))
    asked = layouts_of(resolved, layouts)
    _require_attributes(resolved, asked)
    if device == "cuda":
        require_cuda(max(layout.num_ranks for layout in asked))
    request = ProofRequest(
        job=resolved.job,
        layouts=asked,
        num_steps=steps,
        precision=precision,
        repeat=repeat,
        planted=plant,
        device=device,
        timeout_s=timeout_s,
        max_ranks=max_ranks,
    )
    return viewed(ProofResult, _prove(request, report))


def _require_attributes(resolved: ResolvedJob, asked: Sequence[Layout]) -> None:
    """Raise ConfigError for layouts that a class of the user's own lacks an attribute for, as its source shows."""
    section = resolved.job.model
    if not is_object_source(section.source):
        return
    problems = []
    for layout in asked:
        job = resolved.job.replace(layout=LayoutRequest(**layout.to_dict()))
        found = object_problems("model", section, resolved.folder, job)
        # A layout of one key names it already.
        label = f"{layout_text(layout)}: " if len(asked) > 1 else ""
        problems += [f"{label}{problem}" for problem in found if problem.startswith("layout.")]
    raise_problems(resolved.path, problems)


def split_words(words: Sequence[Layout | str]) -> tuple[list[Layout | str], tuple[str, ...]]:
    """Return the layouts among `words`, and the others: keys of the job's other sections, "section.key=value".

    Raises ConfigError for what is neither text nor a Layout.
    """
    layouts: list[Layout | str] = []
    overrides: list[str] = []
    for word in words:
        if not isinstance(word, Layout | str):
            raise ConfigError(f'{word!r} is no layout: write "tp=2" or Layout(tp=2), and other keys as "train.seed=3"')
        key = "" if isinstance(word, Layout) else word.partition("=")[0]
        section, dot, _ = key.partition(".")
        if isinstance(word, str) and dot and "," not in section and section.strip() != "layout":
            overrides.append(word)
        else:
            layouts.append(word)
    _refuse_lone_key(layouts)
    return layouts, tuple(overrides)


def _refuse_lone_key(layouts: Sequence[Layout | str]) -> None:
    """Raise ConfigError for layout.KEY=VALUE next to another layout, which reads as a key of that one."""
    words = [one for one in layouts if isinstance(one, str)]
    lone = next((one for one in words if one.strip().startswith("layout.") and "," not in one), None)
    if lone is None or len(layouts) == 1:
        return
    key = _bare(lone)
    name = key.partition("=")[0]
    other = next((bare for bare in map(_bare, words) if f",{name}=" not in f",{bare}"), "KEY=VALUE")
    raise ConfigError(
        f"{lone} is a key of [layout] next to another layout, and each word is one layout: write {other},{key} for one "
        f"with both, or {key} for a layout of that key alone"
    )


def layouts_of(resolved: ResolvedJob, layouts: Sequence[Layout | str]) -> list[Layout]:
    """Return the layouts to prove: those given, or a set in which every pair of axes is used together."""
    given = [one if isinstance(one, Layout) else parse_layout(_bare(one)) for one in layouts]
    return given or list(covering_layouts(resolve_architecture(resolved.job.model)))


def _bare(text: str) -> str:
    """Return a layout without the `layout.` that other commands ask for before each key."""
    return ",".join(pair.strip().removeprefix("layout.") for pair in text.split(","))
