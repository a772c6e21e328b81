"""fields_unseen_in_shapes: what changes a model's results and no tensor's shape, so that a checkpoint must name it."""

import json
from typing import Any

from meshwright.spec.model.architecture import LlamaArchitecture

_FIELDS = (
    *("norm_eps", "rope_theta", "rope_scaling", "yarn", "rope_interleaved", "sliding_window", "layer_types"),
    *("experts_per_token", "swiglu_limit"),
)
_OF_ROUTER = ("score", "normalize_weights", "weight_scale", "num_groups", "groups_per_token")


def fields_unseen_in_shapes(architecture: LlamaArchitecture) -> dict[str, Any]:
    """Return these fields by name, as JSON holds them; those of the router of experts as router.NAME."""
    values = json.loads(architecture.model_dump_json())
    fields = {name: values[name] for name in _FIELDS if name in values}
    router = values.get("router") or {}
    return fields | {f"router.{name}": router[name] for name in _OF_ROUTER if name in router}


def differing_fields(saved: dict[str, Any] | None, architecture: LlamaArchitecture | None) -> str | None:
    """Return how `architecture` differs from the fields of a checkpoint, None if it does not or they are not known."""
    if saved is None or architecture is None:
        return None
    own = fields_unseen_in_shapes(architecture)
    # One pattern of layers has several spellings.
    wrong = [name for name in sorted(saved.keys() & own.keys() - {"layer_types"}) if saved[name] != own[name]]
    return ", ".join(f"{name} was {saved[name]}, is {own[name]}" for name in wrong) or None
