"""Pairs of answers in records, one preferred to the other, and their tokens.

A record holds a chosen and a rejected answer under data.chosen_key and data.rejected_key: two texts, or two lists of
messages. A prompt in the same form comes before both; without one, the messages that both begin with are the prompt.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.data.cache.token_file import Tokens
from meshwright.data.conversations.conversation_encoder import END_OF_CONVERSATION, ConversationEncoder
from meshwright.data.conversations.records import (
    COMPLETION,
    MESSAGES,
    PROMPT,
    TOOLS,
    Conversation,
    as_conversation,
    as_json_bytes,
    form_words,
    present_fields,
    shown_record_value,
)
from meshwright.data.formats.readers import Broken, Piece
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

CHOSEN, REJECTED = "chosen", "rejected"
"""Keys of a pair in the form that `as_pair` returns: two conversations."""
_BETWEEN = np.array([END_OF_CONVERSATION], np.uint32)

Pair = dict[str, Conversation]


class PairForm:
    """A record as a document: the JSON of both of its conversations."""

    member_suffix: str | None = None
    takes_text = False

    def __init__(self, section: DataSection, check: Callable[[Pair], object]) -> None:
        """`check` raises DataError for a pair that cannot be learned, as one that the chat template refuses."""
        self._keys, self._check = (section.chosen_key, section.rejected_key), check
        self.columns: Sequence[str] = (*self._keys, PROMPT, TOOLS)
        self.what = (
            f'two answers, such as {{"{PROMPT}": "...", "{self._keys[0]}": "...", "{self._keys[1]}": "..."}}, texts or '
            'lists of messages, which train.task = "dpo" learns from'
        )

    def missing(self, present: Sequence[str], where: str) -> Broken | None:
        """Return that one of the answers is not among these fields."""
        lacking = [repr(key) for key in self._keys if key not in present]
        if not lacking:
            return None
        fields = ", ".join(map(repr, present)) or "none"
        return Broken(
            f"{where} lacks {' and '.join(lacking)} (its fields: {fields}): set data.chosen_key and "
            "data.rejected_key to the fields that hold the two answers"
        )

    def document(self, record: Mapping[str, Any], where: str) -> Piece | Broken:
        """Return the pair in a record."""
        if (missing := self.missing([*record], where)) is not None:
            return missing
        try:
            pair = as_pair(record, where, self._keys)
        except DataError as error:
            return Broken(str(error))
        try:
            self._check(pair)
        except DataError as error:
            return Broken(f"{where}: {error}")
        return Piece(as_json_bytes(pair), ends_document=True)


def as_pair(record: Mapping[str, Any], where: str, keys: tuple[str, str]) -> Pair:
    """Return the two conversations of a record, with what both begin with as given; raises DataError."""
    fields = present_fields(record)
    if (problem := _form_problem(fields, keys) or _answer_problem(fields, keys)) is not None:
        raise DataError(f"{where}: {problem}: correct or remove the record")
    answers = [fields[key] for key in keys]
    prompt = fields.get(PROMPT, "")
    if PROMPT not in fields and isinstance(answers[0], list):
        num_shared = _num_shared(*answers)
        prompt, answers = answers[0][:num_shared], [answer[num_shared:] for answer in answers]
    found = {}
    for name, key, answer in zip((CHOSEN, REJECTED), keys, answers, strict=True):
        one = {PROMPT: prompt, COMPLETION: answer, TOOLS: fields.get(TOOLS)}
        found[name] = as_conversation(one, f"{where}, {key!r}", MESSAGES)
    return found


def _form_problem(fields: Mapping[str, Any], keys: tuple[str, str]) -> str | None:
    """Return which field is neither text nor a list of messages, or not what the others are."""
    for key in (PROMPT, *keys):
        value = fields.get(key)
        if key == PROMPT and value is None:
            continue
        if isinstance(value, dict):
            return f"field {key!r} is one object, not a list of messages: put it into a list"
        if not isinstance(value, str | list):
            return f"field {key!r} is {shown_record_value(value)}, neither text nor a list of messages"
        if not value and key != PROMPT:
            return f"field {key!r} is empty"
    first, *others = [key for key in (PROMPT, *keys) if key in fields]
    for key in others:
        if type(fields[key]) is not type(fields[first]):
            forms = f"field {first!r} is {form_words(fields[first])} and field {key!r} is {form_words(fields[key])}"
            return f"{forms}, but all are texts or all are lists of messages"
    return None


def _answer_problem(fields: Mapping[str, Any], keys: tuple[str, str]) -> str | None:
    """Return that nothing is to be preferred: both answers are equal, or one is where the other begins."""
    chosen, rejected = (fields[key] for key in keys)
    if chosen == rejected:
        return f"fields {keys[0]!r} and {keys[1]!r} are equal, so that neither answer is the better one"
    if PROMPT in fields or isinstance(chosen, str):
        return None
    num_shared = _num_shared(chosen, rejected)
    for key, other in (keys, keys[::-1]):
        if num_shared == len(fields[key]):
            return f"field {key!r} holds no answer of its own: field {other!r} begins with all of its messages"
    return None


def _num_shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return how many messages both begin with."""
    differs = [one != other for one, other in zip(chosen, rejected, strict=False)]
    return differs.index(True) if True in differs else len(differs)


class PairEncoder(ConversationEncoder):
    """What the token cache needs of a tokenizer, for documents that are the JSON of pairs.

    The tokens of a pair are those of the chosen conversation, END_OF_CONVERSATION, and those of the rejected one.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.learned = {**self.learned, "task": "dpo"}
        self.identity = f"pairs, {self.identity}"

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of pairs given as JSON, targets with TARGET_BIT; raises DataError."""
        pairs = [json.loads(text) for text in texts]
        halves = self.encode([pair[half] for pair in pairs for half in (CHOSEN, REJECTED)])
        chosen, rejected = halves[::2], halves[1::2]
        return [np.concatenate((one, _BETWEEN, other)) for one, other in zip(chosen, rejected, strict=True)]

    def has_target(self, conversation: Conversation) -> bool:
        """Return whether anything of both answers of a pair is learned."""
        return all(super(PairEncoder, self).has_target(conversation[half]) for half in (CHOSEN, REJECTED))

    def require_rendered(self, conversation: Conversation) -> None:
        """Raise DataError for a pair that the template refuses or makes equal, or whose answers are unknown in it."""
        chosen, rejected = (self._with_spans(conversation[half]) for half in (CHOSEN, REJECTED))
        if chosen == rejected:
            raise DataError(
                f"the chat template {self.template.name} makes the same text of both answers, so that neither is the "
                "better one: correct or remove the record, or set data.chat_template to one that keeps them apart"
            )
