"""What a job names as my_module:MyName: the user's own model or data, found by name and made with its options."""

import importlib
import inspect
import re
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError

_PACKAGE = Path(__file__).parents[2]
_OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_object_source(source: str) -> bool:
    """Return whether `source` has the form my_module:MyName and is no file's name."""
    return _OBJECT.fullmatch(source) is not None and not Path(source).exists()


def import_object(key: str, source: str) -> Any:
    """Return what `source`, the value of `key`, names; looks in the working directory and in sys.path."""
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
        raise ConfigError(f"{key} = {source!r}: {reason}, or correct {key}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} = {source!r}: importing it raised {place_of(error)}: correct it") from error
    if not hasattr(module, name):
        public = [public for public in vars(module) if not public.startswith("_")]
        nearest = get_close_matches(name, public, n=1, cutoff=0.5)
        raise ConfigError(
            f"{key} = {source!r}: {module_name} ({module.__file__}) has no {name}: "
            f"{f'did you mean {nearest[0]}?' if nearest else f'define it there, or correct {key}'}"
        )
    return getattr(module, name)


def module_dir(source: str) -> str | None:
    """Return the folder in which the imported module of `source` was found; None if `source` names no module."""
    name = source.partition(":")[0]
    file = getattr(sys.modules.get(name), "__file__", None) if is_object_source(source) else None
    if file is None:
        return None
    depth = name.count(".") + (Path(file).stem == "__init__")
    return str(Path(file).resolve().parents[depth])


def find_modules_in(folder: str | None) -> None:
    """Let modules be imported from `folder`, if it exists, before the working directory."""
    if folder is not None and Path(folder).is_dir() and folder not in sys.path:
        sys.path.insert(0, folder)


def make_object(section: str, source: str, options: dict[str, Any]) -> Any:
    """Return what [section]'s source makes of its options; raises ConfigError with the place of what goes wrong."""
    key = f"{section}.source"
    make = import_object(key, source)
    if not callable(make):
        raise ConfigError(
            f"{key} = {source!r} is {type(make).__name__}, but a class, or a function that makes an object, "
            f"is needed: correct {key}"
        )
    if (problem := options_problem(section, source, options, inspect.signature(make))) is not None:
        raise ConfigError(problem)
    try:
        return make(**options)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} = {source!r}: building it raised {place_of(error)}: correct it") from error


def options_problem(section: str, source: str, options: dict[str, Any], signature: inspect.Signature) -> str | None:
    """Return why `source`, which is called with `signature`, does not take its options; None where it does."""
    try:
        signature.bind(**options)
    except TypeError as error:
        return f"{section}.options = {options} do not fit {source}{signature}: {error}: correct {section}.options"
    return None


def place_of(error: BaseException) -> str:
    """Return an error with the user's innermost line in its traceback; a SyntaxError names its own."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((one for one in reversed(frames) if not Path(one.filename).is_relative_to(_PACKAGE)), frames[-1])
    where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{where}"
