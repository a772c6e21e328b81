"""Data of a proof: conversations and pairs are the job's own, from the start of its data; text is written for it.

What a fine-tuning job can get wrong is in its batch: which targets count, where a row's documents end, how rows are
padded. The small model has few tokens, so ids are taken modulo its vocabulary, which leaves all of that as it was.

Text has no such structure. There each sample ignores a different number of targets: with equal numbers, a loss that
counts targets wrongly per microbatch or per shard of a sequence would still be right.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.cache.prepared_folder import find_prepared
from meshwright.data.conversations.conversation_encoder import END_OF_CONVERSATION
from meshwright.data.corpus import CorpusTokens, map_corpora
from meshwright.data.dataset import build_dataset
from meshwright.data.formats.source_file import is_url
from meshwright.data.mixing.mixture_dataset import MixtureDataset
from meshwright.data.numbered_samples import IGNORED, Dataset, Sample
from meshwright.data.packing.packed_dataset import PackedDataset
from meshwright.data.packing.pair_dataset import PairDataset
from meshwright.data.packing.pair_mixture import PairMixture
from meshwright.data.packing.whole_documents import TARGET_BIT
from meshwright.data.token_dataset import TokenDataset
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection, Task, TooLong
from meshwright.spec.model.model_source import resolve_architecture

_NUM_DOCUMENTS = 2000
_MAX_BYTES, _MAX_TOKENS = 2**20, 2**18
"""Of the job's own data, read and kept: hundreds of conversations. All pairs are scored, on each layout."""
_STRIDE = 7
"""Difference of the numbers of ignored targets between consecutive samples of text."""


def write_corpus(file: Path) -> None:
    """Write many short documents, each also as a conversation and as a pair, so that every sequence spans several."""
    with file.open("w", encoding="utf-8") as lines:
        for n in range(_NUM_DOCUMENTS):
            question, answer = f"{n} times {n}?", f"{n * n}"
            said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            pair = {"prompt": question, "chosen": answer, "rejected": f"-{n}"}
            lines.write(json.dumps({"text": f"{n} times {n} is {n * n}", "messages": said, **pair}) + "\n")


def reads_own_data(job: Job) -> bool:
    """Return whether the proof reads the job's own data: conversations or pairs that are on this machine."""
    return job.train.task != "pretrain" and all(
        is_url(source) or Path(source).expanduser().exists()
        for source in (table.source for table in job.data.mixture or (job.data,))
    )


def proof_section(job: Job, corpus: Path) -> DataSection:
    """Return [data] of the small job: its own, or that of `write_corpus`; what is made of it lies next to `corpus`."""
    section, task = job.data, job.train.task
    common: dict[str, Any] = {
        "cache_dir": str(corpus.parent / "cache"),
        "validation_fraction": 0.0,
        "too_long": _too_long(job),
    }
    if reads_own_data(job):
        # What is prepared already is read as it is.
        is_text = not section.mixture and find_prepared(section) is None
        return section.replace(**common, max_bytes=min(section.max_bytes, _MAX_BYTES if is_text else section.max_bytes))
    kept: dict[str, Any] = {key: getattr(section, key) for key in ("packing", "mask_documents", "shuffle")}
    if task != "pretrain":
        kept["train_on"] = section.train_on
    return DataSection(source=str(corpus), **kept, **common)


def _too_long(job: Job) -> TooLong:
    """Return what becomes of a document longer than a sequence of the small job."""
    by_task: dict[Task, TooLong] = {"sft": "cut", "dpo": "skip", "pretrain": "cut"}
    return "stop" if job.data.packing == "split" and job.train.task == "pretrain" else by_task[job.train.task]


class WithIgnoredTargets(Dataset):
    """Samples of a token dataset with their first targets ignored; at least one target counts."""

    may_ignore_targets = True

    def __init__(self, dataset: TokenDataset, seq_len: int) -> None:
        num_samples = dataset.num_samples
        super().__init__(num_samples, 0.0, dataset.fingerprint)
        self.vocab_size, self.end_of_document = dataset.vocab_size, dataset.end_of_document
        self._dataset, self._seq_len = dataset, seq_len

    def read(self, index: int) -> Sample:
        """Return (inputs, targets), each int64 [seq_len], some of the targets IGNORED."""
        inputs, targets = self._dataset.read(index)
        targets = targets.copy()
        targets[: index * _STRIDE % self._seq_len] = IGNORED
        return inputs, targets


def proof_dataset(job: Job) -> Dataset:
    """Return what a small job trains on: rows of the start of its conversations or pairs, or text.

    A user's model reads all of its data as it is. Raises DataError for data that cannot be read.
    """
    section, train, architecture = job.data, job.train, resolve_architecture(job.model)
    if train.task == "pretrain" or architecture is None:
        dataset = build_dataset(section, train.seq_len, train.task)
        return WithIgnoredTargets(dataset, train.seq_len) if isinstance(dataset, TokenDataset) else dataset
    kind, per_item = (PairDataset, 2) if train.task == "dpo" else (PackedDataset, 1)
    vocab_size = architecture.vocab_size
    sources = map_corpora(
        section,
        train.task,
        lambda corpus: kind(corpus.section, train.seq_len, _few(corpus.tokens(), per_item, vocab_size)),
    )
    for one in sources:
        one.vocab_size = min(vocab_size, one.vocab_size or vocab_size)
    mixed = PairMixture if train.task == "dpo" else MixtureDataset
    return mixed(section, sources) if section.mixture else sources[0]


def _few(corpus: CorpusTokens, per_item: int, vocab_size: int) -> CorpusTokens:
    """Return the first conversations, in items of so many, with ids below `vocab_size`."""
    ends = np.flatnonzero(corpus.tokens[:_MAX_TOKENS] == END_OF_CONVERSATION)[per_item - 1 :: per_item]
    # A first one that is longer than all of this is kept whole.
    tokens = corpus.tokens[: int(ends[-1]) + 1 if len(ends) else len(corpus.tokens)]
    folded = (tokens & ~TARGET_BIT) % np.uint32(vocab_size) | tokens & TARGET_BIT
    return corpus._replace(tokens=np.where(tokens == END_OF_CONVERSATION, tokens, folded))
