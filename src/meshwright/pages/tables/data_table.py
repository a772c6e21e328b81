"""The data of a job on the terminal: tokens prepared, sizes, samples as text, problems."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from meshwright.pages.tables.page_table import PageTable
from meshwright.spec.data_findings import (
    DataPreview,
    DataProblem,
    DataStatistics,
    DataVerification,
    Preparation,
    PreparedTokens,
    SamplePreview,
    SourceStatistics,
    TextSegment,
)
from meshwright.units import counted, format_bytes, format_count, format_duration

_BAR_COLUMNS = 24
_MOST_PROBLEMS = 50
_MOST_ALIKE = 3
_MOST_NUMBERS = 20
_NUMBER, _SAMPLE = re.compile(r"\d+"), re.compile(r"sample \d+")
_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))}
"""Control characters of a corpus, which would act on the terminal, as their escapes."""


def preparation_page(preparation: Preparation) -> Iterator[RenderableType]:
    """Yield the parts of what `data prepare` prints."""
    for one in preparation.sources:
        size = f"{format_bytes(one.num_bytes)} of text in {counted(one.num_documents, 'document')}"
        yield f"[bold]{escape(one.source)}[/]: {size}, {counted(one.num_parts, 'part')}"
        yield _made_words(one)
        if one.num_tokens is not None:
            yield f"[dim]{escape(one.path)}[/]"
        for line in one.left_out:
            # Not wrapped: its paths are copied.
            yield Text(f"- {line}" if not line.startswith(" ") else line)
        if one.folder is not None:
            # Not wrapped: it is copied.
            yield Text(f"- portable: data.source={one.folder}")


def _made_words(one: PreparedTokens) -> str:
    made = f"{one.num_parts_made} tokenised now in {format_duration(one.duration_s)}"
    if one.num_parts_missing:
        missing = counted(one.num_parts_missing, "part")
        return f"- {made}; [yellow]{missing} missing[/], of other shards: {_number_words(one.parts_missing)}"
    if one.num_tokens is None:
        return f"- {made}; none missing: call once without --shard to join them"
    return f"- [green]{format_count(one.num_tokens)} tokens[/]: {made}; training finds them"


def _number_words(numbers: Sequence[int]) -> str:
    """Return the first of some numbers, and how many follow."""
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    return shown if len(numbers) <= _MOST_NUMBERS else f"{shown} and {len(numbers) - _MOST_NUMBERS} more"


def statistics_page(found: DataStatistics) -> Iterator[RenderableType]:
    """Yield the parts of what `data stats` prints."""
    for one in found.sources:
        yield from _source_parts(one, found.seq_len)
        yield ""
    if not found.num_training_samples:
        yield "samples  of an iterable, which has no numbered ones: they are not counted, and only training reads them"
        return
    samples = f"{found.num_training_samples:,} for training, {found.num_validation_samples:,} for validation"
    yield f"samples  {samples}: {escape(', '.join(found.sample_shapes))}"
    for note in found.notes:
        yield f"         {escape(note)}"
    yield f"steps    {found.steps:,} of {counted(found.samples_per_step, 'sample')} make {found.epochs:.3g} epochs"
    yield f"reading  {format_duration(found.read_s_per_step)} a step, in one process"


def _source_parts(one: SourceStatistics, seq_len: int) -> Iterator[RenderableType]:
    size = f"{format_bytes(one.num_bytes)} of text in {counted(one.num_documents, 'document')}"
    yield f"[bold]{escape(one.source)}[/]: {size}, {format_count(one.num_tokens)} tokens"
    epochs = "" if one.epochs is None else f"; {one.epochs:.3g} epochs"
    yield f"{one.bytes_per_token:.3g} bytes a token{_rate_words(one)}{epochs}"
    total = max(1, sum(length.num_documents for length in one.lengths))
    yield f"{one.num_longer:,} {one.unit}s ({one.num_longer / total:.1%}) are longer than seq_len = {seq_len}"
    table = PageTable("tokens#", f"{one.unit}s#", "share#", "of tokens#", "")
    most = max((length.num_documents for length in one.lengths), default=1)
    for length in one.lengths:
        table.add_row(
            f"{length.from_tokens:,} to {length.to_tokens:,}",
            f"{length.num_documents:,}",
            f"{length.num_documents / total:.1%}",
            f"{length.num_tokens / max(1, one.num_tokens):.1%}",
            "█" * round(_BAR_COLUMNS * length.num_documents / most),
        )
    yield table


def _rate_words(one: SourceStatistics) -> str:
    if one.tokenize_bytes_per_s is None:
        return "; tokenised already"
    whole = format_duration(one.num_bytes / one.tokenize_bytes_per_s)
    return f"; tokenising {format_bytes(one.tokenize_bytes_per_s)}/s now, the whole in about {whole}"


def preview_page(found: DataPreview) -> Iterator[RenderableType]:
    """Yield the parts of what `data preview` prints: a gutter says what is learned, also without colours."""
    if any(one.segments for one in found.samples):
        yield "[dim]│ the model learns to write this   · context only   ── a document ends[/]"
    for one in found.samples:
        yield ""
        yield _sample_words(one)
        # The answers of pairs alternate.
        for answer, segments in groupby(one.segments, lambda segment: segment.answer):
            if answer is not None:
                yield Text(f"{answer}:", "bold")
            yield from map(_segment_text, segments)


def _sample_words(one: SamplePreview) -> str:
    slot = "" if one.slot is None else f" in slot {one.slot}"
    ignored = f", {one.num_ignored} ignored" if one.num_ignored else ""
    places = f"; from {', '.join(one.places)}" if one.places else ""
    shapes = ", ".join(one.shapes)
    return f"[bold]sample {one.sample}[/]{slot}: " + escape(
        f"{shapes}: {counted(one.num_targets, 'target')}{ignored}{places}"
    )


def _segment_text(segment: TextSegment) -> Text:
    gutter, style = ("│ ", "") if segment.is_target else ("· ", "dim")
    lines = segment.text.translate(_UNPRINTABLE).split("\n")
    text = Text("\n").join(Text(gutter + line, style) for line in lines)
    return text.append("\n──", "cyan") if segment.ends_document else text


def verification_page(found: DataVerification) -> Iterator[RenderableType]:
    """Yield the parts of what `data verify` prints."""
    state = f"[bold red]{counted(found.num_problems, 'problem')}[/]" if found.num_problems else "[green]valid[/]"
    yield f"[bold]{escape(found.source)}[/]: {state}{f' [yellow]{found.scope}[/]' if found.scope else ''}"
    if found.num_files:
        empty = f", {found.num_empty_files} of them empty" if found.num_empty_files else ""
        documents = f"{counted(found.num_documents, 'good document')}, {format_bytes(found.num_bytes)}"
        yield f"- {counted(found.num_files, 'file')}{empty}: {documents} in {format_duration(found.duration_s)}"
    for rest in found.unread:
        unread = f"{rest.num_files_unread} of {counted(rest.num_files, 'file')}"
        what = unread if rest.num_files_unread else "the rest of the last file"
        yield Text(f"- {rest.source}: stopped at data.max_bytes = {rest.max_bytes}: {what} not read", "yellow")
    for line in found.unread_files:
        yield Text(f"- {line}", "yellow")
    for cache in found.caches:
        yield f"- token cache: {cache}"
    if found.num_samples:
        yield f"- {found.num_samples} of {counted(found.num_all_samples, 'sample')} read twice"
    yield from _problem_lines(found)


def _problem_lines(found: DataVerification) -> Iterator[RenderableType]:
    """Yield the first problems, of samples with one problem the first few."""
    groups: dict[str, list[DataProblem]] = {}
    for problem in found.problems:
        is_sample = _SAMPLE.fullmatch(problem.where) is not None
        key = _NUMBER.sub("#", problem.reason) if is_sample else f"{problem.where}: {problem.reason}"
        groups.setdefault(key, []).append(problem)
    num_shown = 0
    for alike in list(groups.values())[:_MOST_PROBLEMS]:
        for problem in alike[:_MOST_ALIKE]:
            is_said = problem.where in problem.reason
            # Not wrapped: lines of a log are searched.
            yield Text(f"- {problem.reason}" if is_said else f"- {problem.where}: {problem.reason}")
        if len(alike) > _MOST_ALIKE:
            is_all = len(alike) == found.num_samples
            of_all = f": all of the {found.num_samples} samples read" if is_all else ""
            yield f"  and {len(alike) - _MOST_ALIKE} more like these{of_all}"
        num_shown += len(alike)
    if found.num_problems > num_shown:
        yield f"{found.num_problems - num_shown} more: --json has up to {len(found.problems)}"
