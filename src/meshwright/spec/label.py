"""label_of(): what tables and messages call a field: its key as JSON, without the unit."""

from __future__ import annotations

import re

_UNIT = re.compile(r"(?<!_per)_(s|bytes)$")
_SPELLED = {
    word.lower(): word for word in ("CP", "CPU-bound", "DP", "EP", "FLOPs", "FSDP", "GEMM", "HFU", "MFU", "P2P")
}
_SPELLED |= {"tp": "TP", "memory-bound": "memory-bound"}


def label_of(key: str) -> str:
    """Return the words for a key: "optimizer state" for optimizer_state_bytes, "tokens/s" for tokens_per_s."""
    words = _UNIT.sub("", key.removeprefix("num_")).replace("_per_", "/").replace("_bound", "-bound").split("_")
    return " ".join(_SPELLED.get(word, word) for word in words)
