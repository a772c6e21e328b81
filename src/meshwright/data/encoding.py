"""Encoding: how the documents of a job are read and become tokens, for its task."""

from functools import cached_property

from meshwright.data.cache.encode import Encoder
from meshwright.data.conversations.chat_template import load_chat_template
from meshwright.data.conversations.conversation_encoder import ConversationEncoder
from meshwright.data.conversations.pair_records import PairEncoder, PairForm
from meshwright.data.conversations.records import DOCUMENT_VERSION, ConversationForm
from meshwright.data.formats.document_form import DocumentForm, TextForm
from meshwright.data.sources import SourceReader, pieces
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.spec.job.sections import DataSection, Task


class Encoding:
    """The tokenizer of a job, and for conversations its chat template; each is loaded once, when it is needed.

    What loads them raises DataError about their files.
    """

    def __init__(self, section: DataSection, task: Task) -> None:
        self._section, self.task = section, task

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return load_tokenizer(self._section.tokenizer)

    @cached_property
    def conversations(self) -> ConversationEncoder | None:
        """Return what makes tokens of conversations, or of pairs of them; None for text."""
        if self.task == "pretrain":
            return None
        kind = PairEncoder if self.task == "dpo" else ConversationEncoder
        return kind(self._section, self.tokenizer, load_chat_template(self._section, self.tokenizer))

    @property
    def encoder(self) -> Encoder:
        """Return what makes tokens of documents."""
        return self.conversations or self.tokenizer

    @cached_property
    def reader(self) -> SourceReader:
        """Return what reads documents: of text, or conversations that the template takes."""
        if self.conversations is None:
            return pieces
        name = "differing answers" if self.task == "dpo" else "conversations"
        return SourceReader(self.form, f"{name} {DOCUMENT_VERSION}, {self.conversations.identity}")

    def form(self, section: DataSection) -> DocumentForm:
        """Return what is a document in a record of one source."""
        if self.conversations is None:
            return TextForm(section)
        kind = PairForm if self.task == "dpo" else ConversationForm
        return kind(section, self.conversations.require_rendered)
