"""What of a job's [adapter] is known to fail before its model is built, and how much of a model an adapter trains."""

from math import prod
from pathlib import Path

from meshwright.checkpoint.peft.peft_config import config_problems
from meshwright.errors import MeshwrightError, problems_raised_by
from meshwright.spec.job.job import Job
from meshwright.spec.job.rules.adapter_rules import target_problems
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.weight_shapes import weight_shapes
from meshwright.spec.step.adapter import Adapter

_WEIGHT, _ROUTER = ".weight", ".router.weight"


def adapter_job_problems(job: Job) -> list[str]:
    """Return why an adapter cannot be made: patterns without a layer, a folder that is no such adapter."""
    adapter = job.adapter
    if not adapter.freezes_base:
        return []
    problems: list[str] = []
    if adapter.initial is not None:
        folder = Path(adapter.initial).expanduser()
        try:
            problems += config_problems(folder, adapter)
        except MeshwrightError as error:
            problems.append(str(error))
    # The layers of a class of the user's own are known once it is built.
    if problems_raised_by(lambda: resolve_architecture(job.model)):
        return problems
    if (architecture := resolve_architecture(job.model)) is not None:
        layers = [*_layer_shapes(architecture)]
        others = [name.removesuffix(_WEIGHT) for name in weight_shapes(architecture)]
        problems += target_problems(adapter, layers, [name for name in others if name not in layers])
    return problems


def adapter_parameters(job: Job) -> tuple[int, int] | None:
    """Return the adapted layers and the parameters that are trained; None for a user's model, or without an adapter."""
    architecture = resolve_architecture(job.model)
    if architecture is None or not job.adapter.freezes_base:
        return None
    shapes = adapter_shapes(job.adapter, architecture)
    return len(shapes) // len(job.adapter.parts), sum(map(prod, shapes.values()))


def adapter_shapes(adapter: Adapter, architecture: LlamaArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's parameters by name, all that are trained."""
    layers = _layer_shapes(architecture)
    return {
        f"{layer}.{part}": shape
        for layer in adapter.adapted(layers)
        for part, shape in adapter.parameter_shapes(*layers[layer]).items()
    }


def _layer_shapes(architecture: LlamaArchitecture) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the linear layers of the blocks, by name."""
    return {
        name.removesuffix(_WEIGHT): (shape[0], shape[1])
        for name, shape in weight_shapes(architecture).items()
        if name.startswith("blocks.") and name.endswith(_WEIGHT) and not name.endswith(_ROUTER) and len(shape) == 2
    }
