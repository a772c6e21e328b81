"""Whether my_module:MyModel exists, from files alone: importing it would import torch, or run the user's code."""

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def object_problems(key: str, source: str, folder: Path) -> list[str]:
    """Return what is wrong with a `my_module:MyName` of `key`, looked for in `folder`, here and on sys.path."""
    module, _, name = source.partition(":")
    places = [str(folder.resolve()), str(Path.cwd()), *sys.path]
    spec = _find(module, places)
    if spec is None:
        return [
            f"{key} = {source!r}: there is no module {module} in {places[0]}, the working directory or the "
            f"environment: put {module.replace('.', '/')}.py there, or change {key}"
        ]
    if spec.origin is None or not spec.origin.endswith(".py"):
        return []
    return _name_problems(key, source, name, Path(spec.origin))


def _find(module: str, places: Sequence[str]) -> ModuleSpec | None:
    importlib.invalidate_caches()
    spec = None
    for part in module.split("."):
        # By its last name alone: with the whole name, Python looks for the packages above among those imported.
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    return spec


def _name_problems(key: str, source: str, name: str, file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        return [f"{key} = {source!r}: {file}:{error.lineno} is not Python ({error.msg}): correct that line"]
    except OSError as error:
        return [f"{key} = {source!r}: {file} cannot be read ({error.strerror}): check its permissions"]
    names = list(_top_level_names(tree))
    if name in names or "*" in names:
        return []
    close = get_close_matches(name, names, n=1)
    advice = f"did you mean {source.partition(':')[0]}:{close[0]}?" if close else f"define it there, or change {key}"
    return [f"{key} = {source!r}: {file} defines no {name}: {advice}"]


def _top_level_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name bound outside functions and classes, also under if and try; "*" where that cannot be known."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
                continue
            case ast.alias(name=name, asname=asname):
                yield asname or name.partition(".")[0]
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
        pending.extend(ast.iter_child_nodes(node))
