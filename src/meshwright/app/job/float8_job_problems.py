"""What of a job's float8 is known to fail before its model is built: a package, layers and patterns of names."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec

from meshwright.errors import problems_raised_by
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.model.weight_shapes import weight_shapes
from meshwright.spec.problem import did_you_mean

_ROUTER = ".router"
"""How the names of routers end."""
NEEDS_TORCHAO = "needs the package torchao: run pip install '.[torchao]' in Meshwright's checkout"
"""What follows a key whose value takes the extra torchao."""


def float8_job_problems(job: Job) -> list[str]:
    """Return why float8 layers cannot be made: torchao is missing, patterns that match no linear layer of a block."""
    section = job.precision
    if section.float8 == "none":
        return []
    problems: list[str] = []
    if find_spec("torchao") is None:
        problems.append(f'precision.float8 = "{section.float8}" {NEEDS_TORCHAO}, or set it to "none"')
    architecture = (
        None if problems_raised_by(lambda: resolve_architecture(job.model)) else resolve_architecture(job.model)
    )
    if section.float8_experts and architecture is not None and not isinstance(architecture, MoEArchitecture):
        problems.append(
            f"precision.float8_experts = true, but model.source = {job.model.source!r} has no experts: set it to false"
        )
    if architecture is None:
        # The layers of a class of the user's own are known once it is built.
        if section.float8_filter != "none" and is_object_source(job.model.source):
            problems.append(
                f'precision.float8_filter = "{section.float8_filter}" predicts layers, and those of {job.model.source}'
                ", a class of your own, are not known before it is built: name them in precision.float8_skip"
            )
        return problems
    shapes = weight_shapes(architecture)
    names = [name.removesuffix(".weight") for name in shapes if name.startswith("blocks.") and name.endswith(".weight")]
    layers = [name for name in names if len(shapes[f"{name}.weight"]) == 2]
    return [*problems, *_skip_problems(section.float8_skip, layers, [name for name in shapes if ".experts." in name])]


def _skip_problems(patterns: Sequence[str], layers: Sequence[str], experts: Sequence[str]) -> Iterator[str]:
    """Yield the patterns of precision.float8_skip that leave no linear layer out which would be in float8."""
    taken = [layer for layer in layers if not layer.endswith(_ROUTER)]
    for pattern in patterns:
        given = f'precision.float8_skip has "{pattern}", which'
        if any(fnmatchcase(layer, pattern) for layer in taken):
            continue
        if any(fnmatchcase(layer, pattern) for layer in layers):
            yield f"{given} matches routers alone, and those are never in float8: leave it out"
        elif any(fnmatchcase(name, pattern) for name in experts):
            yield f"{given} matches experts alone: leave it out, and set precision.float8_experts"
        else:
            near = did_you_mean(pattern, taken) or f": names are such as {taken[0]}"
            yield f"{given} matches no linear layer of a block{near}"
