"""Continuation: tokens whose log-likelihood after a context is asked for, cut and split as lm-evaluation-harness does.

The context and the continuation are encoded together, since a tokenizer may merge characters across the boundary, and
what exceeds the tokens of the context alone is the continuation. Whitespace at the end of the context belongs to the
continuation, because tokens of words begin with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError
from meshwright.units import counted


@dataclass(frozen=True)
class Continuation:
    """What a model reads, and the tokens that are scored."""

    inputs: tuple[int, ...]
    """The context and all tokens of the continuation but the last one."""
    targets: tuple[int, ...]
    """The tokens of the continuation, which the last `len(targets)` inputs predict."""
    is_cut: bool = field(default=False, compare=False)
    """Whether the context has lost its beginning, since the model reads no more."""


@dataclass(frozen=True)
class ContinuationEncoder:
    """Encoder of texts into continuations for one model."""

    tokenizer: Tokenizer
    max_tokens: int
    """Tokens that the model reads at most; the context is cut off at its beginning to fit."""
    start: tuple[int, ...] = ()
    """Ids before every text, such as Llama 3's <|begin_of_text|>."""

    @property
    def prefix(self) -> int:
        """Return the id that is the context of a text without any."""
        return self.start[-1] if self.start else self.tokenizer.end_of_text

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, after those that begin every text."""
        return (*self.start, *(int(token) for token in self.tokenizer.encode(text)))

    def __call__(self, context: str, continuation: str) -> Continuation:
        """Return what to score; raises DataError where no token is left for the continuation, or too many are."""
        num_kept = len(context.rstrip())
        context, text = context[:num_kept], context[num_kept:] + continuation
        before, whole = self.encode(context), self.encode(context + text)
        if not before:
            before, whole = (self.prefix,), (self.prefix, *whole)
        targets = whole[len(before) :]
        if not targets:
            raise DataError(
                f"the continuation {text!r} has no token of its own after the context: the tokenizer merges it with "
                "what stands before it, so put the delimiter or more text at its beginning"
            )
        if len(targets) > self.max_tokens:
            raise DataError(
                f"the continuation {text[:40]!r}... has {counted(len(targets), 'token')}, more than the "
                f"{self.max_tokens} that the model reads at once: shorten it, or let the model read more (a job's "
                "train.seq_len, --max-tokens of a command)"
            )
        tokens = (*before, *targets)
        is_cut = len(tokens) > self.max_tokens + 1
        return Continuation(tokens[-(self.max_tokens + 1) :][:-1], targets, is_cut)

    def windows(self, text: str) -> list[Continuation]:
        """Return what to score for the log-likelihood of a whole text: each token once, after as many as fit."""
        tokens, size = self.encode(text), self.max_tokens
        whole = (self.prefix, *tokens)
        ends = [*range(size, len(tokens), size), len(tokens)] if tokens else []
        return [
            Continuation(whole[max(0, end - size) : end], tokens[start:end])
            for start, end in zip((0, *ends), ends, strict=False)
        ]


def cut_note(continuations: Iterable[Continuation]) -> str:
    """Return how many contexts lose their beginning, as the end of a sentence; "" where none does."""
    cut = [one.is_cut for one in continuations]
    return f"; {sum(cut)} of {counted(len(cut), 'context')} lose their beginning: the model reads no more" * any(cut)
