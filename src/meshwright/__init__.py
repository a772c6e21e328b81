"""Meshwright plans, proves and runs the training of large models on PyTorch.

Commands are functions here: `import meshwright as mw; mw.plan(model="llama3-8b", cluster="h100:64", ...)`. Each is
imported when it is first used, so that this import takes no time and no torch. `mw.checkpoints` is a module: `ls`,
`verify`, `inspect`, `diff`, `gc`, `reshard`; so is `mw.datasets`: `prepare`, `stats`, `preview`, `verify`; and so is
`mw.hf`: the table that stores a model of your own for Hugging Face. `mw.CheckpointFolder` saves and loads in a training
loop of your own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright import hf as hf
    from meshwright.app.chaos import chaos
    from meshwright.app.check import check
    from meshwright.app.conversion import checkpoints as checkpoints
    from meshwright.app.conversion.exchange import export, generate
    from meshwright.app.conversion.import_weights import import_weights
    from meshwright.app.data import datasets as datasets
    from meshwright.app.job.jobs import load_job
    from meshwright.app.join import join
    from meshwright.app.plan import plan
    from meshwright.app.precompile import precompile
    from meshwright.app.prove import prove
    from meshwright.app.reports.compare import compare
    from meshwright.app.reports.diagnose import diagnose
    from meshwright.app.reports.profile import profile
    from meshwright.app.reports.report import report
    from meshwright.app.simulate import simulate
    from meshwright.app.train import resume, train
    from meshwright.checkpoint.loop.checkpoint_folder import CheckpointFolder

__version__ = "0.1.0"
_PLACES = {
    "load_job": "job.jobs",
    "plan": "plan",
    "check": "check",
    "simulate": "simulate",
    "prove": "prove",
    "precompile": "precompile",
    "chaos": "chaos",
    "train": "train",
    "join": "join",
    "profile": "reports.profile",
    "resume": "train",
    "generate": "conversion.exchange",
    "export": "conversion.exchange",
    "import_weights": "conversion.import_weights",
    "report": "reports.report",
    "compare": "reports.compare",
    "diagnose": "reports.diagnose",
}
"""Each function's module in meshwright.app."""

__all__ = [
    "CheckpointFolder",
    "chaos",
    "check",
    "compare",
    "diagnose",
    "export",
    "generate",
    "import_weights",
    "join",
    "load_job",
    "plan",
    "precompile",
    "profile",
    "prove",
    "report",
    "resume",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    """Return one of the functions, imported now."""
    if name == "checkpoints":
        return import_module("meshwright.app.conversion.checkpoints")
    if name == "datasets":
        return import_module("meshwright.app.data.datasets")
    if name == "CheckpointFolder":
        return import_module("meshwright.checkpoint.loop.checkpoint_folder").CheckpointFolder
    if name == "hf":
        return import_module("meshwright.hf")
    if name not in _PLACES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    in_python = import_module("meshwright.app.arguments").in_python
    function = in_python(getattr(import_module(f"meshwright.app.{_PLACES[name]}"), name))
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "checkpoints", "datasets", "hf"])
