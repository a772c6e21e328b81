"""Streaming text of generated tokens, without partial characters."""

from __future__ import annotations

from meshwright.data.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
# UTF-8 characters have at most four bytes, so four tokens without a character are invalid.
_MAX_PENDING = 4


class TextStream:
    """Decoder of ids into pieces of text, whose concatenation is the whole text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the text completed by this token; "" while a character is incomplete."""
        self._pending.append(token)
        text = self._text_of_pending()
        if text.endswith(_UNFINISHED) and len(self._pending) < _MAX_PENDING:
            return ""
        return self._show(text)

    def end(self) -> str:
        """Return the remaining text."""
        return self._show(self._text_of_pending())

    def _text_of_pending(self) -> str:
        # Decoded after the previous tokens: at the start of a text a leading space may be dropped.
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._pending])[len(before) :]

    def _show(self, text: str) -> str:
        self._shown, self._pending = self._pending or self._shown, []
        return text
