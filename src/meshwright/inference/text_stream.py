"""TextStream: the text of tokens as they come, never half a character."""

from __future__ import annotations

from meshwright.data.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
# The longest UTF-8 character has four bytes, so four tokens that are still no character never become one.
_MAX_PENDING = 4


class TextStream:
    """Turns ids into pieces of text whose concatenation is the text of all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that became certain with this token: empty while a character is incomplete."""
        self._pending.append(token)
        text = self._text_of_pending()
        if text.endswith(_UNFINISHED) and len(self._pending) < _MAX_PENDING:
            return ""
        return self._show(text)

    def end(self) -> str:
        """Return what was held back."""
        return self._show(self._text_of_pending())

    def _text_of_pending(self) -> str:
        # A token may look different at the start of a text (a word's leading space), so one that is shown goes before.
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._pending])[len(before) :]

    def _show(self, text: str) -> str:
        self._shown, self._pending = self._pending or self._shown, []
        return text
