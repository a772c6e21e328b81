"""Runs a notebook as Jupyter would: its code cells in order, the value of each last line shown."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def run_notebook(file: Path) -> dict[str, Any]:
    """Return the names that the code cells leave; a cell is skipped whose tags name a package that is not installed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and all(map(find_spec, cell["metadata"].get("tags", []))):
            _run("".join(cell["source"]), names, f"{file.name}:{cell['id']}")
    return names


def _run(source: str, names: dict[str, Any], place: str) -> None:
    """Run one cell, and make the HTML of what its last line returns."""
    tree = ast.parse(source, place)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), names)
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), place, "eval"), names)
        if shown is not None:
            assert getattr(shown, "_repr_html_", lambda: repr(shown))()
