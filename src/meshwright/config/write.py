"""A Job as a TOML file that reads back to an equal Job, and a job file's text with another layout in it."""

from __future__ import annotations

import textwrap
from typing import Any

import tomlkit
from tomlkit.items import Item, Table

from meshwright.config.keys import SECTIONS, Key, job_keys, section_meaning
from meshwright.config.toml_text import shown, toml_value
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout

_WIDTH = 100


def to_toml(job: Job, comments: bool = True, first_line: str = "") -> str:
    """Return the text of a job file; `first_line` is for a `#:schema` comment.

    Keys that have no value, and a dp_shard that was left out, are commented out with an example, or left out where
    there are no comments.
    """
    values = job.to_dict()
    if job.layout.is_open:
        values["layout"]["dp_shard"] = None
    blocks = [first_line] if first_line else []
    blocks.append(_key_text(job_keys()["schema_version"], values["schema_version"], comments))
    for section in SECTIONS:
        keys = [key for key in job_keys().values() if key.section == section]
        lines = [*(_comment(section_meaning(section)) if comments else []), f"[{section}]"]
        texts = [_key_text(key, values[section][key.name], comments) for key in keys]
        blocks.append("\n".join([*lines, *filter(None, texts)]))
    return "\n\n".join(blocks) + "\n"


def key_comment(key: Key) -> str:
    """Return what a key means, what its value must be and its default, in one line."""
    rule = key.rule[0].upper() + key.rule[1:]
    default = "" if key.is_optional else f"; default {shown(key.default)}"
    return f"{key.meaning} {rule}{default}."


def _key_text(key: Key, value: Any, comments: bool) -> str:
    lines = _comment(key_comment(key)) if comments else []
    if value is not None:
        lines.append(f"{key.name} = {toml_value(value)}")
    elif comments:
        lines.append(f"# {key.name} = {toml_value(key.default if key.example is None else key.example)}")
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


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
