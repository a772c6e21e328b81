"""What preparing and examining the data of a job finds: tokens made, sizes, samples as text, what is corrupt."""

from typing import Literal

from meshwright.spec.frozen import Frozen


class PreparedTokens(Frozen):
    """The tokens of one source, or the share of one call in them."""

    source: str
    path: str
    """The token file that training maps."""
    num_bytes: int
    """Text of the source, up to data.max_bytes."""
    num_documents: int
    num_parts: int
    num_parts_made: int
    """Parts that this call tokenised; the others were there."""
    num_parts_missing: int
    """Parts that other calls are still to make; 0 when training can start."""
    parts_missing: list[int] = []
    """Their numbers, from 0: part P is of shard P modulo N of --shard I/N."""
    num_tokens: int | None = None
    """With end of text after each document; None while parts are missing."""
    left_out: list[str] = []
    """Lines about documents that were left out, since they cannot be read or are copies, and files of other kinds."""
    duration_s: float
    folder: str | None = None
    """The portable folder that was written."""


class Preparation(Frozen):
    """What `data prepare` made."""

    sources: list[PreparedTokens]

    @property
    def is_complete(self) -> bool:
        """Return whether training finds all tokens."""
        return all(one.num_tokens is not None for one in self.sources)


class LengthBin(Frozen):
    """Documents of similar lengths."""

    from_tokens: int
    to_tokens: int
    """Both ends are in the bin."""
    num_documents: int
    num_tokens: int


class SourceStatistics(Frozen):
    """Sizes of one source of text."""

    source: str
    num_bytes: int
    num_documents: int
    num_tokens: int
    """Of whole documents, with the end of text after each."""
    bytes_per_token: float
    lengths: list[LengthBin]
    """Documents by their tokens, end of text included, in powers of two."""
    num_longer: int
    """Documents of more than train.seq_len tokens."""
    unit: str = "document"
    """What has these lengths: a document, or of preferences an answer with its prompt."""
    tokenize_bytes_per_s: float | None = None
    """Measured now on the first text of the source; None of tokens that are there already."""
    epochs: float | None = None
    """Times that the job's steps read the training samples of a mixture's source; None without a mixture."""


class DataStatistics(Frozen):
    """What a job's steps make of its data."""

    source: str
    sources: list[SourceStatistics]
    """Empty where data.source is a class of the user's."""
    seq_len: int
    sample_shapes: list[str]
    """Dtype and shape of the arrays of a sample."""
    num_training_samples: int
    num_validation_samples: int
    samples_per_step: int
    steps: int
    epochs: float
    """Times that the job's steps read each training sample."""
    read_s_per_step: float
    """Time to read the samples of a step in one process, measured on a few."""
    notes: list[str] = []
    """What training logs of its samples: how full rows are, and what was left out."""


class TextSegment(Frozen):
    """Tokens of a sample that follow each other, are of one document, and are all learned or all not."""

    text: str
    num_tokens: int
    is_target: bool
    """Whether the model learns to write them; the first token of a sample is never learned."""
    ends_document: bool
    answer: Literal["chosen", "rejected"] | None = None
    """Which answer of a pair it is of, with its prompt; None where there are no pairs."""


class SamplePreview(Frozen):
    """One sample as a step reads it."""

    sample: int
    slot: int | None = None
    """Its place in the global batch; None where the sample was asked for by number."""
    shapes: list[str]
    segments: list[TextSegment]
    """Empty where the sample is no text."""
    num_targets: int
    num_ignored: int
    """Targets of -100, which the loss leaves out."""
    places: list[str]
    """Where its documents are from, in order; empty where that is unknown."""


class DataPreview(Frozen):
    """Samples as text."""

    source: str
    step: int | None = None
    """The step that reads them; None where samples were asked for by number."""
    samples: list[SamplePreview]


class DataProblem(Frozen):
    """One thing that is wrong with the data."""

    where: str
    """A file, or a sample."""
    reason: str
    """What is wrong, with the line or row of a record, and what to do about it."""


class UnreadRest(Frozen):
    """What was not read of a source, since data.max_bytes of it were."""

    source: str
    max_bytes: int
    num_files: int
    num_files_unread: int
    """0 where only the rest of the last file is not read."""


class DataVerification(Frozen):
    """What was read of a job's data: text up to data.max_bytes, of the samples of a class some."""

    source: str
    num_files: int
    """Files that were read."""
    unread: list[UnreadRest] = []
    """Sources of which data.max_bytes left some out."""
    unread_files: list[str] = []
    """A line for each folder with files that are not read, since they are of other kinds."""
    num_empty_files: int
    """Files without a document, which training skips."""
    num_documents: int
    """Good ones."""
    num_bytes: int
    num_problems: int
    problems: list[DataProblem]
    """In reading order; the first ones where there are very many."""
    caches: list[str]
    """State of each token cache: intact, damaged or absent."""
    num_samples: int
    """Samples that were read twice, to compare them."""
    num_all_samples: int = 0
    """Samples that there are; 0 where none was read."""
    duration_s: float

    @property
    def is_valid(self) -> bool:
        """Return whether no problem was found."""
        return not self.num_problems

    @property
    def scope(self) -> str:
        """Return which part of the data was read; "" for all of it."""
        if self.unread:
            return "up to data.max_bytes, the rest was not read"
        # Samples of text are made of what was read.
        is_part = not self.num_files and self.num_samples < self.num_all_samples
        return f"in {self.num_samples} of {self.num_all_samples} samples, the rest was not read" if is_part else ""
