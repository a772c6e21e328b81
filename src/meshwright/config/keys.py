"""Every key of a job with its meaning, type and default: what show, init, the reference, messages and schema print."""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from meshwright.spec.job.field_docs import choices_of, field_docs, rule_text
from meshwright.spec.job.job import Job

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Job.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
"""The sections in the order of the file, each with its data type."""

_COUNT_SUFFIX = "_tokens"
_COUNT_RULE = ', or a count such as "4M" (4_000_000)'


_LEFT_OUT = {"layout.compile": "auto"}
"""What a job means that leaves a key out, where a Layout made in Python takes another value."""


@dataclass(frozen=True)
class Key:
    """One key of a job: `train.steps`; `schema_version` alone has no section. All else follows from its field."""

    section: str
    name: str

    @property
    def dotted(self) -> str:
        """Return the name as it is written on a command line."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def meaning(self) -> str:
        """Return one sentence with the unit."""
        return field_docs(self._data_type)[self.name]

    def accepts(self, value: Any) -> bool:
        """Return whether `value` alone is allowed, other keys being at their defaults."""
        try:
            self._data_type.model_validate({self.name: value})
        except ValidationError:
            return False
        return True

    @cached_property
    def rule(self) -> str:
        """Return what a value must be, in words: "a whole number, 1 or more"."""
        return ", or ".join(rule_text(kind) for kind in self._kinds) + (_COUNT_RULE if self.is_count else "")

    @property
    def kind(self) -> Literal["string", "integer", "number", "boolean", "array", "object"]:
        """Return what JSON calls the value; of a string the quotes may be left out on a command line."""
        kind: Literal["string", "integer", "number", "boolean", "array", "object"] = self._kinds[0]["type"]
        return kind

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the only values of a string; none when any will do."""
        return choices_of(self._kinds[0])

    @property
    def default(self) -> Any:
        """Return the value of a key that is left out."""
        if self.dotted in _LEFT_OUT:
            return _LEFT_OUT[self.dotted]
        return self._field.get_default(call_default_factory=True)

    @property
    def is_optional(self) -> bool:
        """Return whether leaving the key out means something that no value says."""
        annotation = self._field.annotation
        return get_origin(annotation) is not None and type(None) in get_args(annotation)

    @property
    def is_count(self) -> bool:
        """Return whether the value counts tokens, so that "4M" may be written."""
        return self.name.endswith(_COUNT_SUFFIX)

    @property
    def example(self) -> Any:
        """Return a value to show where the default is to leave the key out."""
        return (self._field.examples or [None])[0]

    @property
    def _data_type(self) -> type[BaseModel]:
        return SECTIONS[self.section] if self.section else Job

    @property
    def _field(self) -> FieldInfo:
        return self._data_type.model_fields[self.name]

    @cached_property
    def _kinds(self) -> list[dict[str, Any]]:
        """Return the JSON Schemas of what a value may be, but for null."""
        schema = _schema(self._data_type)["properties"][self.name]
        return [kind for kind in schema.get("anyOf", []) if kind["type"] != "null"] or [schema]


@cache
def job_keys() -> dict[str, Key]:
    """Return every key of a job by its dotted name, in the order of the file."""
    keys = [Key("", "schema_version")]
    keys += [Key(section, name) for section, data_type in SECTIONS.items() for name in data_type.model_fields]
    return {key.dotted: key for key in keys}


@cache
def section_meaning(section: str) -> str:
    """Return the one sentence that says what a section is about."""
    return (SECTIONS[section].__doc__ or "").splitlines()[0]


@cache
def _schema(data_type: type[BaseModel]) -> dict[str, Any]:
    return data_type.model_json_schema()


SCHEMA_FILE = Path(__file__).with_name("job.schema.json")
"""The schema as shipped; `python -m docs.job_page` writes it again."""


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file."""
    schema = Job.model_json_schema(schema_generator=_WithDescriptions)
    sections = schema["$defs"]
    for data_type in (schema, *sections.values()):
        data_type.pop("title", None)
        data_type["properties"] = {name: _for_toml(value) for name, value in data_type["properties"].items()}
    _accept_counts(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Meshwright job",
        **schema,
    }


def schema_text() -> str:
    """Return the shipped schema file's text."""
    return json.dumps(job_schema(), indent=2) + "\n"


class _WithDescriptions(GenerateJsonSchema):
    """Gives each key the sentence below its field."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """Return the schema of a data type."""
        found = super().model_schema(schema)
        data_type: type[BaseModel] = schema["cls"]
        for name, text in field_docs(data_type).items():
            found["properties"][name]["description"] = text
        return found


def _for_toml(value: dict[str, Any]) -> dict[str, Any]:
    """Return a key's schema without what TOML cannot hold (null) and what says nothing (titles, sections' defaults)."""
    kinds = [kind for kind in value.get("anyOf", []) if kind.get("type") != "null"]
    rest = {name: part for name, part in value.items() if name not in ("title", "anyOf")}
    if "$ref" in rest or (kinds and rest.get("default") is None):
        rest.pop("default", None)
    if len(kinds) > 1:
        return {**rest, "anyOf": kinds}
    return {**rest, **(kinds[0] if kinds else {})}


def _accept_counts(schema: dict[str, Any]) -> None:
    for key in job_keys().values():
        if key.is_count:
            data_type = schema["properties"][key.section]["$ref"].rpartition("/")[2]
            properties = schema["$defs"][data_type]["properties"]
            number = properties[key.name]
            kinds = {name: number.pop(name) for name in ("type", "exclusiveMinimum", "minimum") if name in number}
            properties[key.name] = {**number, "anyOf": [kinds, {"type": "string", "pattern": "^[0-9.]+[kKMGBT]?$"}]}
