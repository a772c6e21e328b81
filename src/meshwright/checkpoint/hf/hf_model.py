"""HfModel: what a Hugging Face folder holds of a model, a built-in one or a user's own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any

from meshwright.checkpoint.hf.maps.families import family_map
from meshwright.checkpoint.hf.maps.shapes import stored_shapes
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_from_hf, architecture_to_hf, unknown_keys_of
from meshwright.spec.model.hf.name_map import BUFFER, NameMap
from meshwright.spec.model.unseen_fields import fields_unseen_in_shapes

Config = Mapping[str, Any]
"""Values of a config.json."""


class HfModel(ABC):
    """Tensors of a model with their names in a Hugging Face folder, and its config.json."""

    shapes: dict[str, tuple[int, ...]]
    """Shape of each tensor by its name in a checkpoint, in the model's order: buffers last."""
    architecture: LlamaArchitecture | None = None
    """None for a class of the user's."""
    vocab_size: int | None
    max_seq_len: int | None

    @property
    def num_parameters(self) -> int:
        """Return the exact number of parameters, tied ones once, without buffers."""
        return sum(prod(shape) for name, shape in self.shapes.items() if not name.startswith(BUFFER))

    @abstractmethod
    def name_map(self, config: Config | None = None) -> NameMap:
        """Return the name map of a folder with this config.json; None is one that an export writes."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the config.json of an export; raises UnsupportedError for a model that transformers lacks."""

    @abstractmethod
    def differences(self, config: Config, source: str) -> dict[str, tuple[Any, Any]]:
        """Return what computes other outputs than a model with `config` from the same tensors: (theirs, ours)."""


class BuiltInModel(HfModel):
    """A model of one of the supported families."""

    architecture: LlamaArchitecture

    def __init__(self, architecture: LlamaArchitecture) -> None:
        self.architecture = architecture
        self.shapes = stored_shapes(architecture)
        self.vocab_size, self.max_seq_len = architecture.vocab_size, architecture.max_seq_len

    def name_map(self, config: Config | None = None) -> NameMap:
        """Return the map of the family in folders of its model_type; further layers are dropped by name."""
        return family_map(self.architecture, config)

    def config(self) -> dict[str, Any]:
        """Return the config.json of the family."""
        return architecture_to_hf(self.architecture)

    def differences(self, config: Config, source: str) -> dict[str, tuple[Any, Any]]:
        """Return the fields of the architecture that differ and cannot be seen in shapes, and keys that are unknown."""
        unknown = unknown_keys_of(config)
        known = {key: value for key, value in config.items() if key not in unknown}
        theirs, ours = (
            fields_unseen_in_shapes(architecture_from_hf(known, source)),
            fields_unseen_in_shapes(self.architecture),
        )
        differing = [name for name in theirs.keys() & ours.keys() if theirs[name] != ours[name]]
        return {
            **{name: (theirs[name], ours[name]) for name in differing},
            **{key: (config[key], "nothing of that name") for key in unknown},
        }
