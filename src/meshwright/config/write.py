"""A Job as a TOML file that reads back to an equal Job; values of a job as files and messages have them."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.items import Item, Table

from meshwright.config.keys import SECTIONS, Key, job_keys, section_meaning
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout

_WIDTH = 100


def to_toml(job: Job, first_line: str = "") -> str:
    """Return the text of a job file; `first_line` is for a `#:schema` comment.

    Keys that have no value, and a dp_shard that was left out, are commented out with an example.
    """
    values = job.to_dict()
    if job.layout.is_open:
        values["layout"]["dp_shard"] = None
    blocks = [first_line] if first_line else []
    blocks.append(_key_text(job_keys()["schema_version"], values["schema_version"]))
    for section in SECTIONS:
        keys = [key for key in job_keys().values() if key.section == section]
        lines = [*_comment(section_meaning(section)), f"[{section}]"]
        texts = [_key_text(key, values[section][key.name]) for key in keys]
        blocks.append("\n".join([*lines, *texts]))
    return "\n\n".join(blocks) + "\n"


def key_comment(key: Key) -> str:
    """Return what a key means, what its value must be and its default, in one line."""
    rule = key.rule[0].upper() + key.rule[1:]
    default = "" if key.is_optional else f"; default {shown(key.default)}"
    return f"{key.meaning} {rule}{default}."


def _key_text(key: Key, value: Any) -> str:
    lines = _comment(key_comment(key))
    if value is not None:
        lines.append(f"{key.name} = {toml_value(value)}")
    else:
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


def toml_value(value: Any) -> str:
    """Return one line of TOML for a value that TOML knows: `"full"`, `[0.9, 0.95]`, `{ num_layers = 2 }`."""
    match value:
        case Mapping():
            given = {name: each for name, each in value.items() if each is not None}
            inner = ", ".join(f"{toml_key(name)} = {toml_value(each)}" for name, each in given.items())
            return f"{{ {inner} }}" if inner else "{}"
        case str() | bool():
            return _item(value).as_string()
        case Sequence():
            return f"[{', '.join(toml_value(each) for each in value)}]"
        case int() if abs(value) >= 100_000:
            return f"{value:_}"
        case _:
            return _item(value).as_string()


def toml_key(name: str) -> str:
    """Return `name` as a key of TOML, quoted where it has to be."""
    return tomlkit.key(name).as_string()


def toml_path(path: Sequence[str]) -> str:
    """Return a dotted key: `model.options."my key"`."""
    return ".".join(toml_key(name) for name in path)


def shown(value: Any, width: int = 60) -> str:
    """Return a value for a message: as TOML, cut to `width` characters; none where there is none."""
    if value is None:
        return "none"
    text = toml_value(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _item(value: Any) -> Item:
    item: Item = tomlkit.item(value)
    return item
