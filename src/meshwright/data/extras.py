"""Packages that are not part of the base install, imported when they are first needed."""

import importlib
from types import ModuleType

from meshwright.errors import UnsupportedError


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Return `module`; raises UnsupportedError saying which extra of Meshwright brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{purpose} needs the package {module.partition('.')[0]}, which cannot be imported ({error}): "
            f"run pip install 'meshwright[{extra}]'"
        ) from error
