"""What chat templates need of Jinja beyond its own: {% generation %} blocks, and a tojson filter for text."""

import json
from collections.abc import Callable
from typing import Any

from meshwright.extras import import_extra


def generation_extension(opening: str, closing: str) -> Any:
    """Return a Jinja extension whose {% generation %} blocks print their content between the two marks."""
    nodes = import_extra("jinja2.nodes", "a chat template")
    extensions = import_extra("jinja2.ext", "a chat template")

    class Generation(extensions.Extension):  # type: ignore[misc, name-defined]
        """Tag of what the assistant writes."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Return a call of `_marked` with the block's content."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{opening}{caller()}{closing}"

    return Generation


def as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return a value as JSON: unlike Jinja's own filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
