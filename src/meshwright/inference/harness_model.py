"""HarnessModel: a loaded model as lm-evaluation-harness (the extra eval) asks models.

Import it only where lm_eval is installed. The interface is lm_eval.api.model.LM of lm_eval 0.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from meshwright.data.questions.continuation import ContinuationEncoder
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.inference.generate import Sampling, TextStream, generate
from meshwright.inference.loaded_model import LoadedModel
from meshwright.inference.log_likelihood import log_likelihoods

_KNOWN = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"})


@dataclass(frozen=True)
class _Asked:
    """What a task asks of a generated text."""

    sampling: Sampling
    until: tuple[str, ...]
    """Texts before which it ends."""


class HarnessModel(LM):  # type: ignore[misc]
    """The model of one process, for lm_eval.simple_evaluate(model=...)."""

    def __init__(self, loaded: LoadedModel, encoder: ContinuationEncoder, batch_size: int) -> None:
        super().__init__()
        self._loaded, self._encoder, self._batch_size = loaded, encoder, batch_size

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is greedy) of each request (context, continuation)."""
        continuations = [self._encoder(*request.args) for request in requests]
        return [
            (one.value, one.is_greedy) for one in log_likelihoods(self._loaded.model, continuations, self._batch_size)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each request (text,), each token after as many as the model reads."""
        windows = [self._encoder.windows(text) for (text,) in (request.args for request in requests)]
        flat = [window for own in windows for window in own]
        values = iter(log_likelihoods(self._loaded.model, flat, self._batch_size))
        return [sum(next(values).value for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the text that follows each request (context, arguments), one after the other."""
        generated = []
        for seed, request in enumerate(requests):
            context, arguments = request.args
            generated.append(self._generated(context, arguments, seed))
        return generated

    def _generated(self, context: str, arguments: dict[str, Any], seed: int) -> str:
        asked, loaded, tokenizer = _asked(arguments, seed), self._loaded, self._encoder.tokenizer
        room = self._encoder.max_tokens - asked.sampling.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"a task asks for up to {asked.sampling.max_new_tokens} new tokens, but the model reads "
                f"{self._encoder.max_tokens} at most, with the prompt: raise --max-tokens, or lower the task's "
                "max_gen_toks"
            )
        prompt = (self._encoder.encode(context) or (self._encoder.prefix,))[-room:]
        stream, text = TextStream(tokenizer, prompt), ""
        for token in generate(loaded.model, prompt, asked.sampling, stop=loaded.stop, num_tokens=tokenizer.vocab_size):
            text += stream.add(token)
            if any(end in text for end in asked.until):
                break
        else:
            text += stream.end()
        return text[: min([text.find(end) for end in asked.until if end in text], default=len(text))]


def _asked(arguments: dict[str, Any], seed: int) -> _Asked:
    given = dict(normalize_gen_kwargs(arguments))
    if unknown := sorted(given.keys() - _KNOWN):
        raise UnsupportedError(
            f"a task's generation_kwargs hold {', '.join(unknown)}, which generation here does not know: leave them "
            f"out, or use {', '.join(sorted(_KNOWN))}"
        )
    temperature = float(given.get("temperature") or 1.0) if given["do_sample"] else 0.0
    top_k, top_p = given.get("top_k") or None, float(given.get("top_p") or 1.0)
    until = given.get("until") or []
    ends = [until] if isinstance(until, str) else until
    return _Asked(Sampling(given["max_gen_toks"], temperature, top_k, top_p, seed), tuple(filter(None, ends)))
