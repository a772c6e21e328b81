"""target_notes(): how many conversations, or pairs of answers, are left out since nothing in them is a target."""

import json
from collections.abc import Callable
from typing import Any

from meshwright.data.corpus import Corpus, map_corpora
from meshwright.data.formats.document_form import ObservedForm
from meshwright.data.formats.readers import Broken, Piece
from meshwright.data.sources import SourceReader
from meshwright.spec.job.sections import DataSection, Task

MAX_BYTES = 8_000_000
"""Text of a source that is looked at: each record is rendered once more than for the check."""
_PLACES_SHOWN = 3


def target_notes(section: DataSection, task: Task) -> list[str]:
    """Return one note for each source with records that have no target; [] for text, and for prepared tokens.

    Raises DataError for sources that cannot be read.
    """
    notes = [] if task == "pretrain" else map_corpora(section, task, _note)
    return [note for note in notes if note is not None]


def _note(corpus: Corpus) -> str | None:
    encoder = corpus.encoding.conversations
    if encoder is None or not corpus.is_text:
        return None
    section = corpus.section.replace(max_bytes=min(corpus.section.max_bytes, MAX_BYTES))
    count = _Count(encoder.has_target)
    form = ObservedForm(corpus.encoding.form(section), count.add)
    reader = SourceReader(lambda _: form, "records without a target")
    documents = (one for file in reader.files(section) for one in reader.documents(file, section))
    for _ in reader.limited((one for one in documents if isinstance(one, Piece)), section):
        pass
    return count.note(section.source)


class _Count:
    """Number of documents, and the places of those without a target."""

    def __init__(self, has_target: Callable[[Any], bool]) -> None:
        self._has_target, self._num_documents, self._places = has_target, 0, list[str]()

    def add(self, found: Piece | Broken, where: str) -> None:
        """Count what is in a record."""
        if isinstance(found, Piece):
            self._num_documents += 1
            self._places += [] if self._has_target(json.loads(found.utf8)) else [where]

    def note(self, source: str) -> str | None:
        """Return how many documents had no target, and where the first are; None if all had."""
        if not self._places:
            return None
        shown = ", ".join(self._places[:_PLACES_SHOWN])
        more = ", ..." if len(self._places) > _PLACES_SHOWN else ""
        verbs = "has no target and is" if len(self._places) == 1 else "have no target and are"
        return (
            f"{len(self._places)} of {self._num_documents} records read of data.source = {source!r} {verbs} left out "
            f"({shown}{more}): targets are what messages with the role 'assistant', spelled so, or completions hold"
        )
