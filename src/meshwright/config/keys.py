"""Every key of a job with its meaning, type and default: what show, init, the reference and the messages print."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from meshwright.spec.job import Job

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Job.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
"""The sections in the order of the file, each with the noun that it becomes."""

_COUNT_SUFFIX = "_tokens"
_COUNT_RULE = ', or a count such as "4M" (4_000_000)'


@dataclass(frozen=True)
class Key:
    """One key of a job: `train.steps`; `schema_version` alone has no section."""

    section: str
    name: str
    meaning: str
    """One sentence with the unit."""
    rule: str
    """What a value must be, in words: "a whole number, 1 or more"."""
    default: Any
    is_optional: bool
    """Whether leaving the key out means something that no value says."""
    kind: Literal["string", "integer", "number", "boolean", "array", "object"]
    """What JSON calls the value; of a string the quotes may be left out on a command line."""
    choices: tuple[str, ...]
    """The only values of a string; empty when any will do."""
    is_count: bool
    """Whether the value counts tokens, so that "4M" may be written."""
    example: Any
    """A value to show where the default is to leave the key out."""

    @property
    def dotted(self) -> str:
        """Return the name as it is written on a command line."""
        return f"{self.section}.{self.name}" if self.section else self.name

    def accepts(self, value: Any) -> bool:
        """Return whether `value` alone is allowed, other keys being at their defaults."""
        noun = SECTIONS[self.section] if self.section else Job
        try:
            noun.model_validate({self.name: value})
        except ValidationError:
            return False
        return True


@cache
def job_keys() -> dict[str, Key]:
    """Return every key of a job by its dotted name, in the order of the file."""
    keys = [_key("", "schema_version", Job.model_fields["schema_version"], Job)]
    for section, noun in SECTIONS.items():
        keys += [_key(section, name, field, noun) for name, field in noun.model_fields.items()]
    return {key.dotted: key for key in keys}


@cache
def section_meaning(section: str) -> str:
    """Return the one sentence that says what a section is about."""
    return (SECTIONS[section].__doc__ or "").splitlines()[0]


def _key(section: str, name: str, field: FieldInfo, noun: type[BaseModel]) -> Key:
    schema = _schema(noun)["properties"][name]
    kinds = [kind for kind in schema.get("anyOf", []) if kind["type"] != "null"] or [schema]
    value_schema = kinds[0]
    examples = field.examples or [None]
    return Key(
        section=section,
        name=name,
        meaning=field.description or "",
        rule=", or ".join(_rule(kind) for kind in kinds) + (_COUNT_RULE if name.endswith(_COUNT_SUFFIX) else ""),
        default=field.get_default(call_default_factory=True),
        is_optional=_allows_none(field.annotation),
        kind=value_schema["type"],
        choices=_choices(value_schema),
        is_count=name.endswith(_COUNT_SUFFIX),
        example=examples[0],
    )


@cache
def _schema(noun: type[BaseModel]) -> dict[str, Any]:
    return noun.model_json_schema()


def _choices(schema: dict[str, Any]) -> tuple[str, ...]:
    return tuple(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _allows_none(annotation: Any) -> bool:
    return get_origin(annotation) is not None and type(None) in get_args(annotation)


def _rule(schema: dict[str, Any]) -> str:
    if choices := _choices(schema):
        return " or ".join(f'"{choice}"' for choice in choices)
    match schema["type"]:
        case "boolean":
            return "true or false"
        case "integer":
            return _degree_rule(schema) or "a whole number" + _bounds(schema, step=1)
        case "number":
            return "a number" + _bounds(schema, step=0)
        case "array":
            items = schema.get("prefixItems")
            if items is None:
                return "a list of numbers, each " + _rule(schema["items"])
            return f"a list of {len(items)} numbers, each{_bounds(items[0], step=0).removeprefix(',')}"
        case "object":
            return "a table such as { name = value }"
        case _:
            return "a string"


def _degree_rule(schema: dict[str, Any]) -> str:
    return "a whole number, 1 or more, or -1 for the rest of the ranks" if schema.get("minimum") == -1 else ""


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
