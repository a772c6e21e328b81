"""A job file's text with another layout in it; order, comments on other keys and the rest stay as they were written."""

from __future__ import annotations

from typing import Any

import tomlkit
from tomlkit.items import Item, Table

from meshwright.spec.layout.layout import Layout

_SEARCH = "search"
_CHOSEN = "`meshwright plan` has chosen; true lets it choose again"


def with_layout(text: str, layout: Layout) -> str:
    """Return the text of a job that sets `layout` itself: dp_shard, and keys that it had or that are no default."""
    document = tomlkit.parse(text)
    section = document.get("layout")
    if not isinstance(section, Table):
        section = tomlkit.table()
        document["layout"] = section
    for name, field in Layout.model_fields.items():
        value = getattr(layout, name)
        if value is None:
            section.pop(name, None)
        elif value != field.default or name in section or name == "dp_shard":  # left out, it is the rest of the ranks
            section[name] = _plain(value)
    if section.get(_SEARCH):
        section[_SEARCH] = _settled(section.value.item(_SEARCH))
    return tomlkit.dumps(document)


def _settled(search: object) -> Item:
    """Return false in place of true; a comment, which spoke of the search, now says what became of it."""
    settled = tomlkit.item(False)
    if isinstance(search, Item) and search.trivia.comment:
        settled.comment(_CHOSEN).trivia.comment_ws = search.trivia.comment_ws
    return settled


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
