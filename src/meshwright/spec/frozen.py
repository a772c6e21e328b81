"""The base of all data types: frozen, typed, unknown fields refused, JSON both ways."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A frozen record; the sentence below each field is its description wherever it is printed (field_docs)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        # "model" is our word too: [model] in a job, ModelSpec, model_spec().
        protected_namespaces=(),
    )

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers: what JSON and TOML can hold."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Return indented JSON that `from_json` reads back to an equal value."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the value that `values` describe; raises pydantic.ValidationError naming every bad field."""
        return cls.model_validate(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the value that `to_json` wrote."""
        return cls.model_validate_json(text)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes`, validated like any other; fields that were left out stay so."""
        return self.model_validate({**{name: getattr(self, name) for name in self.model_fields_set}, **changes})
