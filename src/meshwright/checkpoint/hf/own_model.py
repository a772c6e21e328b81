"""OwnModel: a user's class whose attribute `hugging_face` is the table of its names in a Hugging Face folder."""

from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.checkpoint.hf.hf_model import Config, HfModel
from meshwright.checkpoint.hf.maps.shapes import tensor_shapes
from meshwright.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.spec.job.user_object import place_of
from meshwright.spec.model.hf.hugging_face_format import HuggingFaceFormat
from meshwright.spec.model.hf.name_map import BUFFER, NameMap
from meshwright.spec.model.hf.name_map_check import name_map_problems
from meshwright.units import first_of

ATTRIBUTE = "hugging_face"
"""Attribute of a user's class: a HuggingFaceFormat, or a method that returns one."""
_NUM_NAMED = 6
# What transformers writes of itself, or computes nothing.
_NOT_OF_THE_MODEL = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


class OwnModel(HfModel):
    """A model of the user's own, with the format of its attribute `hugging_face`."""

    def __init__(self, source: str, module: nn.Module) -> None:
        """Raise UnsupportedError where `module` has no such attribute, ConfigError where it does not fit."""
        self.shapes = tensor_shapes(module)
        self._format = _format_of(source, module)
        self.vocab_size, self.max_seq_len = self._format.vocab_size, self._format.max_seq_len
        buffers = dict(module.named_buffers())
        names = [name.removeprefix(BUFFER) for name in self.shapes if name.startswith(BUFFER)]
        if others := [name for name in names if not buffers[name].is_floating_point()]:
            raise UnsupportedError(
                f"{source} has the persistent buffer {first_of(others)} in {buffers[others[0]].dtype}, and "
                "only floating-point tensors can be exchanged: register it with persistent=False"
            )
        if problems := name_map_problems(self._format.names, self.shapes):
            raise ConfigError(f"{_place(source)} does not fit the model: {first_of(problems, _NUM_NAMED, '; ')}")

    def name_map(self, config: Config | None = None) -> NameMap:
        """Return the user's table, whatever the folder."""
        return self._format.names

    def config(self) -> dict[str, Any]:
        """Return the user's config.json."""
        return dict(self._format.config)

    def differences(self, config: Config, source: str) -> dict[str, tuple[Any, Any]]:
        """Return the values in which both config.json differ."""
        ours = self.config()
        names = ours.keys() & config.keys() - _NOT_OF_THE_MODEL
        return {name: (config[name], ours[name]) for name in names if config[name] != ours[name]}


def has_format(module: nn.Module) -> bool:
    """Return whether a user's model has a table."""
    return hasattr(type(module), ATTRIBUTE) or ATTRIBUTE in vars(module)


def _format_of(source: str, module: nn.Module) -> HuggingFaceFormat:
    if not has_format(module):
        raise UnsupportedError(
            f"{source} has no attribute {ATTRIBUTE}, which names its tensors in a Hugging Face folder: add it (see "
            "docs/how_to/own_model.md); meshwright.checkpoint.checkpoint.load_parameters reads a checkpoint without it"
        )
    try:
        # A property that raised AttributeError would look as if it were missing.
        attribute = getattr(type(module), ATTRIBUTE, None)
        value = attribute.__get__(module) if isinstance(attribute, property) else getattr(module, ATTRIBUTE)
        found: HuggingFaceFormat | Callable[[], HuggingFaceFormat] = value() if callable(value) else value
    except MeshwrightError as error:
        raise ConfigError(f"{_place(source)}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{_place(source)} raised {place_of(error)}: correct it") from error
    if not isinstance(found, HuggingFaceFormat):
        raise ConfigError(
            f"{_place(source)} is a {type(found).__name__}, but must be a meshwright.hf.HuggingFaceFormat, or a method "
            "that returns one: correct it"
        )
    return found


def _place(source: str) -> str:
    return f"{ATTRIBUTE} of {source}"
