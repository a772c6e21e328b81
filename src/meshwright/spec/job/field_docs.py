"""field_docs: the sentence below each field of a data type, read from its source when it is printed.

pydantic can read them too (use_attribute_docstrings), but does so for every data type on import, which takes longer
than the rest of the class's creation.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


@cache
def field_docs(data_type: type[BaseModel]) -> dict[str, str]:
    """Return the sentence below each field by its name, those of the classes that it is made from included."""
    found: dict[str, str] = {}
    for parent in reversed(data_type.__mro__):
        if issubclass(parent, BaseModel) and parent is not BaseModel:
            found |= _own_docs(parent)
    return {name: found[name] for name in data_type.model_fields if name in found}


def _own_docs(data_type: type[BaseModel]) -> dict[str, str]:
    """Return the text that follows each annotated name in the body of the class itself."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(data_type))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        statement.target.id: inspect.cleandoc(after.value.value)
        for statement, after in pairwise(definition.body)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }
