"""A job file's text with another layout in it; comments, order and everything else stay as they were written."""

from __future__ import annotations

from typing import Any

import tomlkit
from tomlkit.items import Table

from meshwright.spec.layout import Layout

_SEARCH = "search"


def with_layout(text: str, layout: Layout) -> str:
    """Return the text of a job that sets `layout` itself: keys that differ from the defaults, or that it had."""
    document = tomlkit.parse(text)
    section = document.get("layout")
    if not isinstance(section, Table):
        section = tomlkit.table()
        document["layout"] = section
    for name, field in Layout.model_fields.items():
        value = getattr(layout, name)
        if value is None:
            section.pop(name, None)
        elif value != field.default or name in section:
            section[name] = _plain(value)
    if _SEARCH in section:
        section[_SEARCH] = False
    return tomlkit.dumps(document)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
