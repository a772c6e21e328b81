"""The JSON Schema of a job, for editors that complete and check TOML (Taplo, Even Better TOML)."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from meshwright.config.keys import job_keys
from meshwright.spec.job.field_docs import field_docs
from meshwright.spec.job.job import Job

SCHEMA_FILE = Path(__file__).with_name("job.schema.json")
"""The schema as shipped; `python -m meshwright.config.reference` writes it again."""


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
