"""Conversations of JSONL and Parquet files, as validated records.

A record holds a list of messages under data.messages_key, or a prompt and its completion: two texts, which no template
changes, or two lists of messages, of which only the completion's are learned.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.data.conversations.record_files import RECORD_SUFFIXES, Records, read_records
from meshwright.data.readers import Piece
from meshwright.data.sources import STDLIB, list_files
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

PROMPT, COMPLETION, MESSAGES, TOOLS, GIVEN = "prompt", "completion", "messages", "tools", "num_given"
"""Keys of a conversation in the form that `as_conversation` returns; GIVEN counts messages that are never learned."""

MARKS = "\ufdd0\ufdd1"
"""Noncharacters of Unicode, with which chat templates mark text; no message may hold them."""

Conversation = dict[str, Any]


def conversation_files(section: DataSection) -> list[Path]:
    """Return the files of data.source that hold records; raises DataError if there are none."""
    files = [] if section.source == STDLIB else list_files(section)
    found = [file for file in files if file.suffix.lower() in RECORD_SUFFIXES]
    if not found:
        raise DataError(
            f'data.source = {section.source!r} holds no conversations, which train.task = "sft" learns from: set it to '
            "a JSONL or Parquet file, or a folder of them, whose records hold "
            f'{{"{section.messages_key}": [{{"role": "user", "content": "..."}}, ...]}}, or a prompt and a completion'
        )
    return found


class ConversationReader:
    """Callable: the conversations of a job as documents, for the token cache, which knows it by its name."""

    def __init__(self, section: DataSection) -> None:
        self.__name__ = f"conversations in {section.messages_key}"

    def __call__(self, section: DataSection) -> Iterator[Piece]:
        """Yield each conversation as a document: its JSON. Whole ones only, up to data.max_bytes; raises DataError."""
        left = section.max_bytes
        for path in conversation_files(section):
            for where, record in records_of(path, section):
                piece = as_piece(as_conversation(record, where, section))
                left -= len(piece.utf8)
                if left < 0:
                    return
                yield piece


def records_of(path: Path, section: DataSection) -> Records:
    """Yield the place and the fields of each record of a file; raises DataError if it cannot be read."""
    return read_records(path, [section.messages_key, PROMPT, COMPLETION, TOOLS])


def as_piece(conversation: Conversation) -> Piece:
    """Return a conversation as a document: its JSON."""
    return Piece(json.dumps(conversation, ensure_ascii=False, sort_keys=True).encode(), ends_document=True)


def as_conversation(record: dict[str, Any], where: str, section: DataSection) -> Conversation:
    """Return what is learned of a record; raises DataError where that is no conversation."""
    fields = _without_null(record)
    key = section.messages_key
    if key in fields:
        return _checked({MESSAGES: fields[key], GIVEN: 0, **_tools(fields)}, where, key)
    prompt, completion = fields.get(PROMPT), fields.get(COMPLETION)
    if isinstance(prompt, str) and isinstance(completion, str):
        return _checked({PROMPT: prompt, COMPLETION: completion}, where, COMPLETION)
    if isinstance(prompt, list) and isinstance(completion, list):
        given = {MESSAGES: [*prompt, *completion], GIVEN: len(prompt), **_tools(fields)}
        return _checked(given, where, f"{PROMPT} or {COMPLETION}")
    present = ", ".join(map(repr, record)) or "none"
    raise DataError(
        f"{where} has no field {key!r}, nor a prompt and a completion that are both texts or both lists of messages "
        f"(its fields: {present}): set data.messages_key to the field that holds the conversation"
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
        return f"is {_shown(messages)}, not a list of messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            return f"has {_shown(message)} as message {number}, not an object with a role and a content"
        if not isinstance(message.get("role"), str):
            return f"has a message {number} without a role ({_shown(message)})"
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return f"has a message {number} without a content of text ({_shown(message)})"
    return None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _without_null(value: Any) -> Any:
    """Return a value without the keys that are null: those that only other rows of a Parquet file have."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value
