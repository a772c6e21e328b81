"""Names of an adapter's tensors in PEFT's files, by the name map of the model.

LAYER.lora_a is base_model.model.THEIRS.lora_A.weight, where THEIRS is the module whose weight LAYER.weight is; B and
DoRA's magnitude likewise (PEFT 0.18 to 0.21, utils/save_and_load.py).
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from meshwright.errors import CheckpointError, UnsupportedError
from meshwright.spec.model.hf.name_map import NameMap, their_name
from meshwright.spec.step.adapter import ADAPTER_PARTS, LORA_A, LORA_B, MAGNITUDE

PREFIX = "base_model.model."
_SUFFIXES = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_WEIGHT = ".weight"


class TheirModule(NamedTuple):
    """A linear layer of theirs."""

    name: str
    is_transposed: bool
    """Whether its weight is stored as (in, out), as GPT-2's are."""


def layers_of(parameters: Iterable[str]) -> list[str]:
    """Return the layers that have an adapter, of the names of a checkpoint's tensors, in their order."""
    return [name.removesuffix(f".{LORA_A}") for name in parameters if name.endswith(f".{LORA_A}")]


def their_module(layer: str, table: NameMap) -> TheirModule | None:
    """Return the module of theirs that is one of our layers; None where none is, as in fused projections."""
    rows = table.find_rows(f"{layer}{_WEIGHT}")
    if len(rows) != 1 or not rows[0].theirs.endswith(_WEIGHT):
        return None
    row = rows[0]
    moves_rows = row.interleaved_heads or row.our_interleaved_heads or row.is_stacked or row.has_experts
    if row.part is not None or row.our_part is not None or moves_rows:
        return None
    return TheirModule(their_name(row, f"{layer}{_WEIGHT}").removesuffix(_WEIGHT), row.is_transposed)


def their_modules(layers: Iterable[str], table: NameMap) -> dict[str, TheirModule]:
    """Return the module of theirs of each of our layers; raises UnsupportedError for one that is part of another."""
    found = {}
    for layer in layers:
        try:
            module = their_module(layer, table)
        except CheckpointError:
            module = None
        if module is None:
            raise UnsupportedError(
                f"{layer} is no linear layer of its own in a Hugging Face folder, such as one of fused or reordered "
                "projections, so PEFT has no name for its adapter: export with --merge, which writes whole weights"
            )
        found[layer] = module
    return found


def keys_of(parameters: Collection[str], table: NameMap) -> dict[str, str]:
    """Return PEFT's key of each of an adapter's parameters."""
    modules = their_modules(layers_of(parameters), table)
    keys = {}
    for name in parameters:
        layer, _, part = name.rpartition(".")
        assert part in ADAPTER_PARTS
        keys[name] = f"{PREFIX}{modules[layer].name}.{_SUFFIXES[part]}"
    return keys
