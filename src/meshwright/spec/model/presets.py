"""PRESETS: named architectures, as presets.toml has them, with their sources; `meshwright list models` prints them."""

import tomllib
from pathlib import Path
from typing import Any

from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.moe_architecture import MoEArchitecture

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _fields(name: str) -> dict[str, Any]:
    """Return the fields of a table, and those of the table that it is like."""
    own = dict(_TABLES[name])
    like = own.pop("like", None)
    return own if like is None else _fields(like) | own


def _architecture(name: str) -> LlamaArchitecture:
    fields = _fields(name)
    kind = MoEArchitecture if "num_experts" in fields else LlamaArchitecture
    return kind.from_dict({"head_dim": fields["dim"] // fields["num_heads"], **fields})


PRESETS: dict[str, LlamaArchitecture] = {name: _architecture(name) for name in _TABLES}
"""Architectures by the name that `model.source` takes."""
