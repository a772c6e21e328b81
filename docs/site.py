"""Hooks of mkdocs: the command line's page is made from the help of its verbs, and links out of docs/ become text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import meshwright
from meshwright.cli.main import VERBS

_PACKAGE = Path(meshwright.__path__[0])
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text with what only the site needs."""
    if page.file.src_uri == "reference/cli.md":
        return markdown + "\n".join(_verb(name, module) for name, (module, _) in VERBS.items())
    if page.file.src_uri == "reference/packages.md":
        return markdown + "\n".join(_packages(_PACKAGE))
    if page.file.src_uri.count("/") == 0:
        # The site holds what is in docs/; files of the repository keep their names.
        return _OUTSIDE.sub(r"\1", markdown)
    return markdown


def _packages(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield a list item for each package below `folder`: its name, number of modules and first sentence."""
    for package in sorted(file.parent for file in folder.glob("*/__init__.py")):
        sentence = (ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or "").split(
            "\n"
        )[0]
        modules = len(list(package.glob("*.py"))) - 1
        yield f"{'    ' * depth}- **`{package.name}/`** ({modules} modules): {sentence}"
        yield from _packages(package, depth + 1)


def _verb(name: str, module: str) -> str:
    command: click.Command = import_module(module).command
    page = _help(name, command)
    if isinstance(command, click.Group):
        page += "".join(_help(f"{name} {verb}", one) for verb, one in command.commands.items())
    return page


def _help(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"meshwright {name}", max_content_width=88, terminal_width=88)
    return f"\n## {name}\n\n```text\n{command.get_help(context)}\n```\n"
