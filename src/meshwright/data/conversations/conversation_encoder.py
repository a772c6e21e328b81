"""Conversations as token ids, each with whether it is a target: a token of what the model is to write.

The whole text of a conversation is encoded at once, as at inference. Which characters the assistant writes is known
from {% generation %} blocks of the template; without them from rendering the messages before each of its turns, and
those up to it, which must both be prefixes of the whole. A token of any of these characters is a target.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.cache.token_file import Tokens
from meshwright.data.conversations.chat_template import ChatTemplate, Span
from meshwright.data.conversations.records import COMPLETION, GIVEN, MESSAGES, PROMPT, TOOLS, Conversation
from meshwright.data.packing.whole_documents import TARGET_BIT
from meshwright.data.tokenizer import Places, Tokenizer
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

END_OF_CONVERSATION = (1 << 32) - 1
"""Written after each conversation; no token."""
_VERSION = "1"
"""Raised when the same conversations get other ids or targets."""


class ConversationEncoder:
    """What the token cache needs of a tokenizer, for documents that are the JSON of conversations."""

    vocab_size = 1 << 32
    """Ids have TARGET_BIT besides their number."""
    end_of_text = END_OF_CONVERSATION

    def __init__(self, section: DataSection, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.template = template
        self.learned = {"chat_template": template.identity, "train_on": section.train_on}
        """What ids and targets follow from besides the tokenizer, by the keys of a job that set it."""
        self._tokenizer, self._train_on = tokenizer, section.train_on
        self.identity = f"{tokenizer.identity}, template {template.identity}, trains on {section.train_on}"
        self.version = f"{_VERSION} {tokenizer.version}"

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of conversations given as JSON, targets with TARGET_BIT; raises DataError."""
        return self.encode([json.loads(text) for text in texts])

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens]:
        """Return uint32 ids of each conversation, targets with TARGET_BIT; raises DataError."""
        rendered = [self._with_spans(conversation) for conversation in conversations]
        encoded = self._tokenizer.encode_located([text for text, _ in rendered])
        return [
            ids.astype(np.uint32) | _overlaps(starts, ends, spans, len(text)) * TARGET_BIT
            for (ids, starts, ends), (text, spans) in zip(encoded, rendered, strict=True)
        ]

    def require_rendered(self, conversation: Conversation) -> None:
        """Raise DataError for a conversation that the template refuses, or of which no one knows what is learned."""
        self._with_spans(conversation)

    def has_target(self, conversation: Conversation) -> bool:
        """Return whether anything of a conversation is learned; raises DataError as `require_rendered` does."""
        return any(end > start for start, end in self._with_spans(conversation)[1])

    def _with_spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the characters that are learned."""
        if MESSAGES not in conversation:
            prompt = conversation[PROMPT]
            text = f"{prompt}{conversation[COMPLETION]}{self._tokenizer.end_of_text_token}"
            return text, [(0 if self._train_on == "all" else len(prompt), len(text))]
        messages, tools = conversation[MESSAGES], conversation.get(TOOLS)
        text, generated = self.template.render(messages, tools)
        if self._train_on == "all":
            return text, [(0, len(text))]
        turns = [turn for turn, one in enumerate(messages) if one["role"] == "assistant"]
        turns = turns[-1:] if self._train_on == "last" else turns
        turns = [turn for turn in turns if turn >= conversation[GIVEN]]
        if not turns:
            return text, []
        if self.template.marks_generation:
            before = messages[: turns[0]]
            has_earlier = any(one["role"] == "assistant" for one in before)
            start = len(self._prefix(text, before, tools)) if has_earlier else 0
            return text, [span for span in generated if span[0] >= start]
        return text, list(self._spans_between_prefixes(text, messages, tools, turns))

    def _spans_between_prefixes(
        self, text: str, messages: Sequence[dict[str, Any]], tools: Any, turns: Sequence[int]
    ) -> Iterator[Span]:
        for turn in turns:
            before = self._prefix(text, messages[:turn], tools, add_generation_prompt=True)
            through = self._prefix(text, messages[: turn + 1], tools) if turn + 1 < len(messages) else text
            yield len(before), max(len(before), len(through))

    def _prefix(
        self, text: str, messages: Sequence[dict[str, Any]], tools: Any, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the first messages as text; raises DataError unless the whole conversation begins with it."""
        found = self.template.render(messages, tools, add_generation_prompt=add_generation_prompt).text
        if not text.startswith(found):
            raise DataError(
                f"the chat template {self.template.name} renders the first {len(messages)} messages of a conversation "
                "differently alone than followed by others, so that which tokens are the assistant's is unknown: put "
                "{% generation %} around what it writes in a copy of the template (data.chat_template), or set "
                "data.train_on to last or all"
            )
        return found


def _overlaps(starts: Places, ends: Places, spans: Sequence[Span], length: int) -> npt.NDArray[np.bool_]:
    """Return which tokens, of the characters from `starts` to `ends`, hold a character of `spans`."""
    is_inside = np.zeros(length, dtype=np.int64)
    for start, end in spans:
        is_inside[start:end] = 1
    num_before = np.concatenate(([0], np.cumsum(is_inside)))
    is_target: npt.NDArray[np.bool_] = num_before[ends] > num_before[starts]
    return is_target
