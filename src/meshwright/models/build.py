"""build_model: from [model] of a job to an nn.Module, ours or the user's."""

import importlib
import inspect
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.llama import Llama
from meshwright.spec.model_source import resolve_architecture
from meshwright.spec.sections import ModelSection


def build_model(section: ModelSection) -> nn.Module:
    """Return the model of `section`, built on torch's current default device; raises ConfigError if it cannot be.

    A Llama's weights are not set yet; a user's model is as its constructor leaves it.
    """
    architecture = resolve_architecture(section)
    if architecture is not None:
        return Llama(architecture)
    build = import_object(section.source)
    if not callable(build):
        raise ConfigError(
            f"model.source = {section.source!r} is {type(build).__name__}, but a class of nn.Module is needed: "
            "name a class, or a function that returns a model"
        )
    try:
        inspect.signature(build).bind(**section.options)
    except TypeError as error:
        raise ConfigError(
            f"model.options = {section.options} do not fit {section.source}{inspect.signature(build)}: {error}"
        ) from None
    try:
        model = build(**section.options)
    except Exception as error:
        raise ConfigError(
            f"model.source = {section.source!r}: building it raised {_place(error)}: correct it"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.source = {section.source!r} made a {type(model).__name__}, but an nn.Module is needed: "
            "derive the class from torch.nn.Module"
        )
    return model


def import_object(source: str) -> Any:
    """Return what `source`, written my_module:Name, names; looks in the working directory and in sys.path."""
    module_name, _, name = source.partition(":")
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        # Python adds it for `python -m`, but not for an installed command.
        sys.path.append(working_directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.split(".")[: error.name.count(".") + 1] == error.name.split("."):
            reason = f"there is no module {error.name} in the working directory or in sys.path: put it there"
        else:
            reason = f"{module_name} imports {error.name}, which is not installed: install it"
        raise ConfigError(f"model.source = {source!r}: {reason}, or correct model.source") from None
    except Exception as error:
        raise ConfigError(f"model.source = {source!r}: importing it raised {_place(error)}: correct it") from error
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        nearest = get_close_matches(name, public, n=1, cutoff=0.5)
        raise ConfigError(
            f"model.source = {source!r}: {module_name} ({module.__file__}) has no {name}: "
            f"{f'did you mean {nearest[0]}?' if nearest else 'define it there, or correct model.source'}"
        )
    return getattr(module, name)


def _place(error: Exception) -> str:
    # The innermost line of a traceback that lies in somebody's file; a SyntaxError names its own.
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{where}"
