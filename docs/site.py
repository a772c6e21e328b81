"""Hooks of mkdocs: the command line's page is made from the help of its verbs, and links out of docs/ become text."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import click

from meshwright.cli.main import VERBS

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text with what only the site needs."""
    if page.file.src_uri == "reference/cli.md":
        return markdown + "\n".join(_verb(name, module) for name, (module, _) in VERBS.items())
    if page.file.src_uri.count("/") == 0:
        # The site holds what is in docs/; files of the repository keep their names.
        return _OUTSIDE.sub(r"\1", markdown)
    return markdown


def _verb(name: str, module: str) -> str:
    command: click.Command = import_module(module).command
    context = click.Context(command, info_name=f"meshwright {name}", max_content_width=88, terminal_width=88)
    return f"\n## {name}\n\n```text\n{command.get_help(context)}\n```\n"
