"""The repository as the architecture tests see it: its files, and the functions in them."""

import ast
import functools
import importlib.util
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "meshwright"


def load_module(name: str) -> ModuleType:
    """Return a Python file of the repository that belongs to no package, such as docs/transcript."""
    spec = importlib.util.spec_from_file_location(name.split("/")[-1], ROOT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def repository_files() -> list[Path]:
    """Return every file that is, or could be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file())


def source_files() -> list[Path]:
    """Return the package's Python files."""
    return [file for file in repository_files() if file.suffix == ".py" and SOURCE in file.parents]


def python_files() -> list[Path]:
    """Return every Python file: package, tests, examples, benchmarks."""
    return [file for file in repository_files() if file.suffix == ".py"]


@functools.cache
def text_of(file: Path) -> str:
    """Return the file's text, or nothing for a binary file; read once for all tests."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@dataclass(frozen=True)
class Function:
    """One function or method as it stands in a file."""

    place: str
    name: str
    num_lines: int
    parameters: tuple[str, ...]
    decorators: tuple[str, ...]


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """Return a file's syntax tree, parsed once for all tests."""
    return ast.parse(text_of(file))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Return the statements within `node`, nested ones included; unlike ast.walk it enters no expression."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


@functools.cache
def functions_of(file: Path) -> list[Function]:
    """Return the file's functions, methods and nested functions included; self and cls are no parameters."""
    return [
        _function(node, file)
        for node in _statements(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, file: Path) -> Function:
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return Function(
        place=f"{file.relative_to(ROOT)}:{node.lineno}",
        name=node.name,
        num_lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        parameters=tuple(name for name in names if name not in ("self", "cls")),
        decorators=tuple(ast.unparse(decorator) for decorator in node.decorator_list),
    )


def fields_of(file: Path) -> Iterator[tuple[str, str]]:
    """Return (place, name) of every annotated field of a class."""
    for node in _statements(tree_of(file)):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield f"{file.relative_to(ROOT)}:{statement.lineno}", statement.target.id
