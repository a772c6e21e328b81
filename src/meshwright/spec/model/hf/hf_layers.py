"""layers_from_hf and layers_to_hf: which layers of a Hugging Face config.json have a sliding window, both ways.

In Mistral and Phi-3 all layers have it, in Qwen those from max_window_layers on, if use_sliding_window is true; GPT-OSS
and newer files of Qwen list each layer's kind in layer_types.
"""

from typing import Any

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_family import ELSEWHERE, Family

_SLIDING, _FULL = "sliding_attention", "full_attention"
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
"""Defaults of transformers where use_sliding_window is true."""


def layers_from_hf(config: dict[str, Any], family: Family, num_layers: int, source: str) -> dict[str, Any]:
    """Return sliding_window and layer_types; none of them where all layers attend to all positions."""
    window, kinds = _window(config, family), config.get("layer_types")
    _require_kinds(kinds, num_layers, {_FULL} if window is None else {_FULL, _SLIDING}, source)
    if window is None:
        return {"sliding_window": None}
    if kinds is None:
        kinds = _kinds(config, family, num_layers)
    elif _FULL in kinds and "layer_types" not in family.defaults and not family.has_window_switch:
        raise UnsupportedError(
            f"{source} has sliding_window = {window} and {_FULL} in layer_types, which {family.title} of transformers "
            f"does not read: set sliding_window to null, or leave layer_types out"
        )
    if _SLIDING not in kinds:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": _shortest(kinds)}


def layers_to_hf(architecture: LlamaArchitecture, family: Family) -> dict[str, Any]:
    """Return the keys that say which layers have the window; none for a family in which all layers do, or none."""
    kinds = [_FULL if architecture.window_of(i) is None else _SLIDING for i in range(architecture.num_layers)]
    if "layer_types" in family.defaults:
        # transformers needs a window even where no layer has it.
        window = architecture.sliding_window or family.defaults["sliding_window"]
        return {"layer_types": kinds, "sliding_window": window}
    if not family.has_window_switch or _SLIDING not in kinds:
        return {}
    window = {"use_sliding_window": True, "sliding_window": architecture.sliding_window}
    return {**window, "max_window_layers": kinds.index(_SLIDING), "layer_types": kinds}


def window_obstacles(architecture: LlamaArchitecture, family: Family) -> list[str]:
    """Return the fields in which the windows of `architecture` differ from all that its family can have."""
    if architecture.sliding_window is None or family.has_window_switch or "layer_types" in family.defaults:
        return []
    if "sliding_window" not in family.optional:
        return ["sliding_window"]
    return ["layer_types"] if _FULL in architecture.layer_types[: architecture.num_layers] else []


def _window(config: dict[str, Any], family: Family) -> int | None:
    """Return the positions that a query of some layers attends to; None where all layers attend to all."""
    window: int | None = None
    if "sliding_window" in family.optional:
        window = config.get("sliding_window", family.defaults.get("sliding_window"))
    elif family.has_window_switch and config.get("use_sliding_window"):
        window = config.get("sliding_window", _QWEN["sliding_window"])
    return window


def _kinds(config: dict[str, Any], family: Family, num_layers: int) -> list[str]:
    if family.has_window_switch:
        first = config.get("max_window_layers", _QWEN["max_window_layers"])
        return [_FULL if layer < first else _SLIDING for layer in range(num_layers)]
    kinds = family.defaults.get("layer_types", (_SLIDING,))
    return [kinds[layer % len(kinds)] for layer in range(num_layers)]


def _require_kinds(kinds: list[str] | None, num_layers: int, known: set[str], source: str) -> None:
    if unlike := sorted(set(kinds or ()) - known):
        raise UnsupportedError(
            f"{source} has layers of type {', '.join(unlike)} in layer_types, but Meshwright computes "
            f"{' and '.join(sorted(known))} only{'' if _SLIDING in known else ' without a sliding_window'}: {ELSEWHERE}"
        )
    if kinds is not None and len(kinds) != num_layers:
        raise ConfigError(
            f"{source} has layer_types of {len(kinds)} layers, but num_hidden_layers = {num_layers}: correct one"
        )


def _shortest(kinds: list[str]) -> tuple[str, ...]:
    """Return the shortest sequence that repeats as `kinds`."""
    lengths = (n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    return tuple(kinds[: next(lengths)])
