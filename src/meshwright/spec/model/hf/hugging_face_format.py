"""HuggingFaceFormat: how a model of the user's own is stored in a Hugging Face folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.model.hf.name_map import NameMap

MODEL_TYPE = "model_type"
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class HuggingFaceFormat:
    """Names and layouts of a model's tensors in a Hugging Face folder, and its config.json.

    Raises ConfigError for other types than these, and for values of `config` that JSON cannot hold.
    """

    names: NameMap
    """Rows for all parameters and persistent buffers."""
    config: Mapping[str, Any]
    """Values of config.json: model_type, and the sizes that transformers needs to build the model."""

    def __post_init__(self) -> None:
        if not isinstance(self.names, NameMap):
            raise ConfigError(f"names is a {type(self.names).__name__}, but must be a NameMap((Rename(...), ...))")
        if not isinstance(self.config, Mapping) or not isinstance(self.config.get(MODEL_TYPE), str):
            raise ConfigError(
                "config must be a dict of the values of config.json, model_type among them, such as "
                '{"model_type": "llama", "hidden_size": 64}: correct it'
            )
        for key, value in self.config.items():
            try:
                json.dumps({key: value}, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"config[{key!r}] = {value!r} is no JSON ({error}): write a string, number, list or dict"
                ) from None

    @property
    def vocab_size(self) -> int | None:
        """Return the rows of the embedding; None where config does not say."""
        return _int_or_none(self.config.get("vocab_size"))

    @property
    def max_seq_len(self) -> int | None:
        """Return the longest sequence; None where config does not say."""
        return next((size for key in _POSITIONS if (size := _int_or_none(self.config.get(key)))), None)


def _int_or_none(value: object) -> int | None:
    return value if isinstance(value, int) else None
