"""field_docs and field_rule: what each field of a data type means, and what its value must be, in words.

The meaning is the sentence below the field, read from its source when it is printed; the rule is that of its JSON
Schema. pydantic can read the sentences too (use_attribute_docstrings), but does so for every data type on import, which
takes longer than the rest of the class's creation.
"""

import ast
import inspect
import textwrap
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

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


def rule_text(schema: dict[str, Any]) -> str:
    """Return what a value that `schema` describes must be."""
    if choices := choices_of(schema):
        return " or ".join(f'"{choice}"' for choice in choices)
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "integer" if schema.get("minimum") == -1:
            return "a whole number, 1 or more, or -1 for the rest of the ranks"
        case "integer":
            return "a whole number" + _bounds(schema, step=1)
        case "number":
            return "a number" + _bounds(schema, step=0)
        case "array":
            items = schema.get("prefixItems")
            if items is None and "$ref" in schema["items"]:
                return "a list of tables"
            if items is None and schema["items"].get("type") == "string" and not choices_of(schema["items"]):
                return "a list of strings"
            if items is None and choices_of(schema["items"]):
                return "a list, each " + rule_text(schema["items"])
            if items is None:
                return "a list of numbers, each " + rule_text(schema["items"])
            return f"a list of {len(items)} numbers, each{_bounds(items[0], step=0).removeprefix(',')}"
        case "string":
            return "a string"
        case _:
            return "a table such as { name = value }"


def choices_of(schema: dict[str, Any]) -> tuple[str, ...]:
    """Return the only values that `schema` allows; none when any will do."""
    return tuple(schema.get("enum", [schema["const"]] if "const" in schema else []))


def field_rule(data_type: type[BaseModel], path: Sequence[int | str]) -> str | None:
    """Return the rule of the field at `path` of `data_type`, fields of its parts included; None where there is none."""
    schema = data_type.model_json_schema()
    parts, found = schema.get("$defs", {}), schema
    for name in path:
        found = found.get("properties", {}).get(name)
        if found is None:
            return None
        kinds = [kind for kind in found.get("anyOf", [found]) if kind.get("type") != "null"]
        found = parts[kinds[0]["$ref"].rpartition("/")[2]] if "$ref" in kinds[0] else kinds[0]
    return rule_text(found)


def _bounds(schema: dict[str, Any], step: int) -> str:
    """Return the bounds in words; `step` turns "above 0" into "1 or more" for whole numbers."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and low == high:
        return f", {low:g}"
    words = []
    if "exclusiveMinimum" in schema:
        above = schema["exclusiveMinimum"]
        words.append(f"{above + step:g} or more" if step else f"above {above:g}")
    elif low is not None:
        words.append(f"{low:g} or more")
    if "exclusiveMaximum" in schema:
        words.append(f"below {schema['exclusiveMaximum']:g}")
    elif high is not None:
        words.append(f"at most {high:g}")
    return ", " + " and ".join(words) if words else ""
