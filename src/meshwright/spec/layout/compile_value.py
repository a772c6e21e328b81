"""Compile and CompileBackend: the types of layout.compile and layout.compile_backend.

The values of "blocks" and "none" are true and false, so that layouts are written as earlier versions wrote them. "auto"
is settled before a layout is applied or priced.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

CompileBackend = Literal["inductor", "aot_eager", "eager"]
_WORDS = {"none": False, "blocks": True}


def _value(given: Any) -> Any:
    return _WORDS.get(given, given) if isinstance(given, str) else given


Compile = Annotated[
    bool | Literal["model", "auto"],
    BeforeValidator(_value, json_schema_input_type=bool | Literal["none", "blocks", "model", "auto"]),
]
