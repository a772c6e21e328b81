"""Which kind of work an operation is, by its name in torch: matmuls and attention are told apart from the rest."""

from __future__ import annotations

import re

OP_KINDS = ("matmul", "attention", "other")

_MATMUL = re.compile(r"\b(_?(grouped|scaled)_mm|(add|b|baddb)?mm|addmv|mv|linear|matmul)\b")
_ATTENTION = re.compile(r"attention|flash_attn|fmha")


def op_kind(name: str) -> str:
    """Return which of OP_KINDS the operation called `name`, such as aten.mm.default, is."""
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name.replace(".", " ")) else "other"
