"""Conversations in records, validated.

A record holds a list of messages under data.messages_key, or a prompt and its completion: two texts, which no template
changes, or two lists of messages, of which only the completion's are learned.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.data.formats.readers import Broken, Piece
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

PROMPT, COMPLETION, MESSAGES, TOOLS, GIVEN = "prompt", "completion", "messages", "tools", "num_given"
"""Keys of a conversation in the form that `as_conversation` returns; GIVEN counts messages that are never learned."""

MARKS = "\ufdd0\ufdd1"
"""Noncharacters of Unicode, with which chat templates mark text; no message may hold them."""

DOCUMENT_VERSION = 2
"""Raised when the same records become other JSON, of conversations or of pairs."""

Conversation = dict[str, Any]


class ConversationForm:
    """A record as a document: the JSON of its conversation."""

    member_suffix: str | None = None
    takes_text = False

    def __init__(self, section: DataSection, check: Callable[[Conversation], object]) -> None:
        """`check` raises DataError for a conversation that cannot be learned, as one that the chat template refuses."""
        self._key, self._check = section.messages_key, check
        self.columns: Sequence[str] = (section.messages_key, PROMPT, COMPLETION, TOOLS)
        self.what = (
            f'a conversation, such as {{"{self._key}": [{{"role": "user", "content": "..."}}, ...]}}, or a prompt and '
            'a completion, which train.task = "sft" learns from'
        )

    def missing(self, present: Sequence[str], where: str) -> Broken | None:
        """Return that neither a conversation nor a prompt and a completion is among these fields."""
        if self._key in present or {PROMPT, COMPLETION} <= {*present}:
            return None
        return Broken(_no_conversation(where, self._key, present))

    def document(self, record: Mapping[str, Any], where: str) -> Piece | Broken:
        """Return the conversation in a record."""
        try:
            conversation = as_conversation(record, where, self._key)
        except DataError as error:
            return Broken(str(error))
        try:
            self._check(conversation)
        except DataError as error:
            return Broken(f"{where}: {error}")
        return as_piece(conversation)


def as_piece(conversation: Conversation) -> Piece:
    """Return a conversation as a document: its JSON."""
    return Piece(as_json_bytes(conversation), ends_document=True)


def as_json_bytes(document: Any) -> bytes:
    """Return JSON whose keys are in the record's order, in which chat templates print objects."""
    return json.dumps(document, ensure_ascii=False).encode()


def as_conversation(record: Mapping[str, Any], where: str, key: str) -> Conversation:
    """Return what is learned of a record; raises DataError where that is no conversation."""
    fields = present_fields(record)
    if key in fields:
        return _checked({MESSAGES: fields[key], GIVEN: 0, **_tools(fields)}, where, key)
    prompt, completion = fields.get(PROMPT), fields.get(COMPLETION)
    if isinstance(prompt, str) and isinstance(completion, str):
        return _checked({PROMPT: prompt, COMPLETION: completion}, where, COMPLETION)
    if isinstance(prompt, list) and isinstance(completion, list):
        given = {MESSAGES: [*prompt, *completion], GIVEN: len(prompt), **_tools(fields)}
        return _checked(given, where, f"{PROMPT} or {COMPLETION}")
    problem = _null_or_unlike(record, key)
    raise DataError(f"{where}: {problem}" if problem else _no_conversation(where, key, [*record]))


def _null_or_unlike(record: Mapping[str, Any], key: str) -> str | None:
    """Return what is wrong with the fields that a record has; None where one that it needs is missing."""
    has_both = record.get(PROMPT) is not None and record.get(COMPLETION) is not None
    if key in record and not has_both:
        return f"field {key!r} is null: correct or remove the record"
    if not {PROMPT, COMPLETION} <= {*record}:
        return None
    prompt, completion = form_words(record[PROMPT]), form_words(record[COMPLETION])
    return (
        f"field {PROMPT!r} is {prompt} and field {COMPLETION!r} is {completion}, but both are texts or both are lists "
        "of messages: correct or remove the record"
    )


def _no_conversation(where: str, key: str, present: Sequence[str]) -> str:
    fields = ", ".join(map(repr, present)) or "none"
    return (
        f"{where} has no field {key!r}, nor both {PROMPT!r} and {COMPLETION!r} (its fields: {fields}): set "
        "data.messages_key to the field that holds the conversation"
    )


def _tools(fields: dict[str, Any]) -> dict[str, Any]:
    return {TOOLS: fields[TOOLS]} if fields.get(TOOLS) else {}


def _checked(conversation: Conversation, where: str, key: str) -> Conversation:
    """Return a conversation whose messages have roles and contents of text that UTF-8 holds; raises DataError."""
    messages = conversation.get(MESSAGES, [])
    problem = _message_problem(messages) if MESSAGES in conversation else None
    text = json.dumps(conversation, ensure_ascii=False, default=str)
    if problem is None and any(mark in text for mark in MARKS):
        problem = f"holds the noncharacter U+{ord(next(mark for mark in MARKS if mark in text)):04X}"
    if problem is None and any("\ud800" <= character <= "\udfff" for character in text):
        problem = "holds half of a surrogate pair, which UTF-8 cannot express"
    if problem is not None:
        raise DataError(f"{where}: field {key!r} {problem}: correct or remove the record")
    return conversation


def _message_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"is {shown_record_value(messages)}, not a list of messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            return f"has {shown_record_value(message)} as message {number}, not an object with a role and a content"
        if not isinstance(message.get("role"), str):
            return f"has a message {number} without a role ({shown_record_value(message)})"
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return f"has a message {number} without a content of text ({shown_record_value(message)})"
    return None


def form_words(value: Any) -> str:
    """Return in words what a field holds: a text, a list of messages, or the value itself."""
    return "a text" if isinstance(value, str) else "a list" if isinstance(value, list) else shown_record_value(value)


def shown_record_value(value: Any) -> str:
    """Return the start of a value as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def present_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null; what is null inside of them is there for chat templates, too."""
    return {key: value for key, value in record.items() if value is not None}
