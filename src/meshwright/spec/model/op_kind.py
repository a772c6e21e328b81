"""op_kind: whether an operation of a trace is a matmul, attention or neither, by its name in torch."""

from __future__ import annotations

import re
from typing import Literal, get_args

OpKind = Literal["matmul", "attention", "other"]
OP_KINDS: tuple[OpKind, ...] = get_args(OpKind)

_MATMUL = re.compile(r"\b(_?(grouped|scaled)_mm|(add|b|baddb)?mm|addmv|mv|linear|matmul)\b")
_ATTENTION = re.compile(r"attention|flash_attn|fmha")


def op_kind(name: str) -> OpKind:
    """Return the kind of the operation called `name`, such as aten.mm.default."""
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name.replace(".", " ")) else "other"
