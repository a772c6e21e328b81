"""The data of a job on the terminal: tokens prepared, sizes, samples as text, problems."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape

from meshwright.spec.data_findings import Preparation, PreparedTokens
from meshwright.units import counted, format_bytes, format_count, format_duration


def preparation_page(preparation: Preparation) -> Iterator[RenderableType]:
    """Yield the parts of what `data prepare` prints."""
    for one in preparation.sources:
        size = f"{format_bytes(one.num_bytes)} of text in {counted(one.num_documents, 'document')}"
        yield f"[bold]{escape(one.source)}[/]: {size}, {counted(one.num_parts, 'part')}"
        yield _made_words(one)
        yield f"[dim]{escape(one.path)}[/]"


def _made_words(one: PreparedTokens) -> str:
    made = f"{one.num_parts_made} tokenised now in {format_duration(one.duration_s)}"
    if one.num_parts_missing:
        return f"- {made}; [yellow]{one.num_parts_missing} missing[/]: of other shards"
    if one.num_tokens is None:
        return f"- {made}; none missing: call once without --shard to join them"
    return f"- [green]{format_count(one.num_tokens)} tokens[/]: {made}; training finds them"
