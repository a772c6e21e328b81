"""Figure: one number and where it comes from. No number about hardware stands without its source."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from meshwright.spec.frozen import Frozen

SourceKind = Literal["datasheet", "measured", "software", "reported"]


class Source(Frozen):
    """Who says so, and when."""

    title: str = Field(min_length=1)
    """The document, or the measurement and the machine it was made on."""
    url: str | None = None
    """Where to read it, if it is on the web."""
    date: str = Field(pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")
    """When it was published, measured or read: YYYY, YYYY-MM or YYYY-MM-DD."""
    kind: SourceKind
    """datasheet: printed by the vendor; measured: read or timed on a device; software: a constant of other software;
    reported: published by a third party."""


class Figure(Frozen):
    """A number in SI base units (the field that holds it names the unit) and its source."""

    value: PositiveFloat
    """The number, in the unit that the field's name ends with."""
    source: Source
    """Where it comes from."""
    note: str | None = None
    """What a reader must know to use it."""
