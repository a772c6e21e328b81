"""Chat templates: Jinja that renders messages as one text, in the dialect of transformers (docs, "Chat templates").

A template runs in a sandbox: it comes with a model and is data, not code. It gets messages, tools,
add_generation_prompt and the special tokens of tokenizer_config.json, and may call raise_exception. strftime_now is not
defined, so that templates take their fixed date where they have one: a sample is a function of its record.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from meshwright.data.conversations.jinja_dialect import as_json, generation_extension
from meshwright.data.conversations.records import MARKS
from meshwright.data.tokenizer import BYTES, Tokenizer
from meshwright.errors import DataError
from meshwright.extras import import_extra
from meshwright.spec.job.sections import DataSection
from meshwright.spec.model.hf.hub_cache import local_path

PLAIN = "plain"
PLAIN_TEMPLATE = """\
{%- for message in messages %}
{{- message['role'] + ':\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}
{{- message['content'] }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:\\n' }}{% endif %}
"""
"""Each message is its role, a colon, a line break, its content and a line break; the assistant's end with eos_token."""
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"

Span = tuple[int, int]


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    generated: list[Span]
    """Characters within {% generation %} blocks, from the first to behind the last of each; [] without blocks."""


class ChatTemplate:
    """A compiled template with the special tokens that it may print."""

    def __init__(self, source: str, name: str, special_tokens: dict[str, str]) -> None:
        """`name` says in messages where the template is from. Raises DataError where it is not valid Jinja."""
        self.source, self.name, self.special_tokens = source, name, special_tokens
        parts = json.dumps([source, sorted(special_tokens.items())])
        self.identity = hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
        """Equal for templates that render equal texts."""
        jinja = import_extra("jinja2", "a chat template")
        sandbox = import_extra("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", generation_extension(*MARKS)]
        )
        environment.filters["tojson"] = as_json
        environment.globals["raise_exception"] = _refuse
        self._error = jinja.TemplateError
        try:
            self._template = environment.from_string(source)
        except jinja.TemplateError as error:
            raise DataError(f"the chat template {name} is no valid Jinja ({error}): correct it") from error

    @property
    def marks_generation(self) -> bool:
        """Return whether the template says itself what the assistant writes."""
        return "endgeneration" in self.source

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """Return the messages as text; raises DataError with the template's own words where it refuses them."""
        if self.source == PLAIN_TEMPLATE:
            _require_contents(messages)
        given = {"messages": list(messages), "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return _unmarked(self._template.render(**self.special_tokens, **given))
        except (self._error, _Refused, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"the chat template {self.name} does not take these messages: {error}") from error


def _require_contents(messages: Sequence[dict[str, Any]]) -> None:
    for number, message in enumerate(messages, start=1):
        if message.get("content") is None:
            raise DataError(
                f"the chat template {PLAIN} writes contents alone, and message {number} has none, only tool_calls: set "
                "data.chat_template to a Jinja file that writes them, or remove the record"
            )


class _Refused(Exception):
    """What a template raises by raise_exception."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _unmarked(marked: str) -> Rendered:
    """Return the text without marks, and what is between each pair of them."""
    pieces, spans, start, at = [], [], 0, 0
    opening, closing = MARKS[0], MARKS[1]
    for piece in marked.replace(closing, f"{opening}{closing}").split(opening):
        is_end = piece.startswith(closing)
        spans += [(start, at)] if is_end else []
        piece = piece.removeprefix(closing)
        start = at
        at += len(piece)
        pieces.append(piece)
    return Rendered("".join(pieces), spans)


def load_chat_template(section: DataSection, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of a job: that of data.chat_template, else of data.tokenizer's folder; raises DataError."""
    folder = None if section.tokenizer == BYTES else _folder(section.tokenizer)
    if section.chat_template is None and folder is not None:
        found = find_chat_template(folder, tokenizer)
        if found is None:
            raise DataError(
                f"data.tokenizer = {section.tokenizer!r} has no chat template (no {TEMPLATE_FILE} and no chat_template "
                f"in {TOKENIZER_CONFIG} next to it): set data.chat_template to a Jinja file, or to plain"
            )
        return found
    tokens = _special_tokens(folder, tokenizer)
    if section.chat_template in (None, PLAIN):
        return ChatTemplate(PLAIN_TEMPLATE, PLAIN, tokens)
    assert section.chat_template is not None
    path = Path(section.chat_template).expanduser()
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), str(path), tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template = {section.chat_template!r} cannot be read ({error}): set it to a Jinja file, to "
            "plain, or leave it out for that of data.tokenizer's folder"
        ) from error


def find_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template in the folder of a tokenizer; None if it has none."""
    tokens, file = _special_tokens(folder, tokenizer), folder / TEMPLATE_FILE
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), str(file), tokens)
    config = folder / TOKENIZER_CONFIG
    source = _read_object(config).get("chat_template")
    if isinstance(source, list):
        # transformers 4 wrote several with names; "default" is for conversations without tools.
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    return None if source is None else ChatTemplate(str(source), f"of {config}", tokens)


def _folder(tokenizer: str) -> Path:
    path = local_path(tokenizer)
    return path if path.is_dir() else path.parent


def _special_tokens(folder: Path | None, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the texts of bos_token, eos_token, ...: the variables of templates."""
    tokens = {"eos_token": tokenizer.end_of_text_token}
    for name in ("special_tokens_map.json", TOKENIZER_CONFIG) if folder is not None else ():
        assert folder is not None
        for key, value in _read_object(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): fix it, or remove it") from error
    return found if isinstance(found, dict) else {}
