"""stats: how much data a job has, and what its steps make of it."""

import itertools
import time
from collections.abc import Callable

import numpy as np

from meshwright.app.arguments import JobSource, checked
from meshwright.app.data.byte_counter import byte_counter
from meshwright.app.data.job_data import dataset_of, errors_of_job_code, of_each, order_of, source_name
from meshwright.app.job.jobs import as_job
from meshwright.app.progress import elapsed
from meshwright.app.results.data_results import StatisticsResult
from meshwright.data.cache.content import Content
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.conversations.conversation_encoder import END_OF_CONVERSATION
from meshwright.data.corpus import Corpus
from meshwright.data.examine.document_lengths import DocumentLengths, document_lengths
from meshwright.data.examine.sample_arrays import shapes_of
from meshwright.data.mixing.mixture_dataset import MixtureDataset
from meshwright.data.numbered_samples import Dataset
from meshwright.spec.data_findings import LengthBin, SourceStatistics
from meshwright.spec.job.job import Job

_TIMED_BYTES = 4 * 2**20
_NUM_TIMED_SAMPLES = 64


@checked
def stats(job: JobSource, *overrides: str) -> StatisticsResult:
    """Return sizes, document lengths, epochs and speeds of the job's data.

    Tokenises what is not in data.cache_dir, as training would.
    """
    found = as_job(job, overrides).job
    name = source_name(found.data)
    with errors_of_job_code(found), elapsed(f"reading {name}") as show:
        sources = of_each(found, lambda corpus: _source(corpus, found.train.seq_len, show))
        dataset = dataset_of(found)
        shapes = shapes_of(dataset.sample(0)) if dataset.num_training_samples else []
        read_s = _read_s(dataset, found)
    num_samples = found.train.steps * found.global_batch_size
    if isinstance(dataset, MixtureDataset):
        uses = order_of(dataset, found).use(num_samples)
        sources = [one.replace(epochs=use.epochs) for one, use in zip(sources, uses, strict=True)]
    return StatisticsResult(
        source=name,
        sources=sources,
        seq_len=found.train.seq_len,
        sample_shapes=shapes,
        num_training_samples=dataset.num_training_samples,
        num_validation_samples=dataset.num_validation_samples,
        samples_per_step=found.global_batch_size,
        steps=found.train.steps,
        epochs=num_samples / max(1, dataset.num_training_samples),
        read_s_per_step=read_s * found.global_batch_size,
        notes=[*dataset.notes],
    )


def _source(corpus: Corpus, seq_len: int, show: Callable[[str], None]) -> SourceStatistics:
    source = corpus.section.source
    cache = corpus.cache(byte_counter(f"reading {source}", None, show)) if corpus.is_text else None
    if cache is not None:
        text = f"tokenising {source}"
        show(text)
        cache.tokens(byte_counter(text, cache.content.num_bytes, show))
    found = corpus.tokens()
    show(f"counting the tokens of {source}")
    if found.learned is None:
        lengths = document_lengths(found.tokens, found.tokenizer.end_of_text, seq_len)
    else:
        lengths = document_lengths(found.tokens, END_OF_CONVERSATION, seq_len, counts_end=False)
    unit = "answer" if corpus.encoding.task == "dpo" else "document"
    sizes = _sizes(source, found.content, sum(lengths.num_tokens), lengths).replace(unit=unit)
    return sizes if cache is None else sizes.replace(tokenize_bytes_per_s=_tokenize_rate(cache))


def _sizes(source: str, content: Content, num_tokens: int, lengths: DocumentLengths) -> SourceStatistics:
    counts = zip(lengths.num_documents, lengths.num_tokens, strict=True)
    bins = [
        LengthBin(from_tokens=2**i, to_tokens=2 ** (i + 1) - 1, num_documents=documents, num_tokens=in_bin)
        for i, (documents, in_bin) in enumerate(counts)
    ]
    return SourceStatistics(
        source=source,
        num_bytes=content.num_bytes,
        num_documents=content.num_documents,
        num_tokens=num_tokens,
        bytes_per_token=content.num_bytes / max(1, num_tokens),
        lengths=list(itertools.dropwhile(lambda one: not one.num_documents, bins)),
        num_longer=lengths.num_longer,
    )


def _tokenize_rate(cache: TokenCache) -> float:
    """Return the bytes of text that are tokenised in a second, by the first ones."""
    batch, num_bytes = [], 0
    for piece in cache.pieces():
        batch.append(piece.text)
        num_bytes += len(piece.utf8)
        if num_bytes >= _TIMED_BYTES:
            break
    start_s = time.perf_counter()
    cache.encoder.encode_batch(batch)
    return num_bytes / (time.perf_counter() - start_s)


def _read_s(dataset: Dataset, job: Job) -> float:
    """Return the time to read one sample, the mean of a few in the order of training."""
    if not dataset.num_training_samples:
        return 0.0
    order = order_of(dataset, job)
    indices = order.samples_at(np.arange(_NUM_TIMED_SAMPLES))
    start_s = time.perf_counter()
    for index in indices:
        dataset.sample(int(index))
    return (time.perf_counter() - start_s) / len(indices)
