"""The section of [data] with the source of each table of a mixture, and its messages."""

from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

_KEYS_OF_A_TABLE = ("source", "text_key", "messages_key", "chosen_key", "rejected_key", "max_bytes")


def mixture_sections(section: DataSection) -> list[DataSection]:
    """Return [data] with each table's source in place of the mixture, in order."""
    return [
        section.replace(
            source=table.source,
            text_key=table.text_key or section.text_key,
            messages_key=table.messages_key or section.messages_key,
            chosen_key=table.chosen_key or section.chosen_key,
            rejected_key=table.rejected_key or section.rejected_key,
            max_bytes=table.max_bytes or section.max_bytes,
            mixture=(),
            stage_steps=(),
        )
        for table in section.mixture
    ]


def of_table(section: DataSection, number: int, message: str) -> str:
    """Return a message about the section of a table, counted from 0, as one about the table."""
    for key in _KEYS_OF_A_TABLE:
        message = message.replace(f"data.{key}", key)
    return f"data.mixture, table {number + 1} ({section.mixture[number].label}): {message}"


@contextmanager
def errors_of_table(section: DataSection, number: int) -> Iterator[None]:
    """Name the table in errors about its data; without a mixture, leave them as they are."""
    try:
        yield
    except DataError as error:
        if not section.mixture:
            raise
        raise DataError(of_table(section, number, str(error))) from error
