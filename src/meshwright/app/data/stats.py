"""stats: how much data a job has, and what its steps make of it."""

import itertools
import time
from collections.abc import Callable

import numpy as np

from meshwright.app.arguments import JobSource, checked
from meshwright.app.data.byte_counter import byte_counter
from meshwright.app.data.job_data import caches_of, dataset_of, order_of
from meshwright.app.job.jobs import as_job
from meshwright.app.progress import elapsed
from meshwright.app.results.data_results import StatisticsResult
from meshwright.data.cache import TokenCache
from meshwright.data.content import Content
from meshwright.data.examine.document_lengths import DocumentLengths, document_lengths
from meshwright.data.examine.sample_arrays import shapes_of
from meshwright.data.numbered_samples import Dataset
from meshwright.data.prepared_folder import find_prepared
from meshwright.data.token_file import Tokens
from meshwright.spec.data_findings import LengthBin, SourceStatistics
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection
from meshwright.spec.job.user_object import is_object_source

_TIMED_BYTES = 4 * 2**20
_NUM_TIMED_SAMPLES = 64


@checked
def stats(job: JobSource, *overrides: str) -> StatisticsResult:
    """Return sizes, document lengths, epochs and speeds of the job's data.

    Tokenises what is not in data.cache_dir, as training would.
    """
    found = as_job(job, overrides).job
    with elapsed(f"reading {found.data.source}") as show:
        caches = caches_of(found, byte_counter(f"reading {found.data.source}", None, show))
        sources = [_source(cache, found.train.seq_len, show) for cache in caches]
        sources += _prepared_source(found.data, found.train.seq_len)
        dataset = dataset_of(found)
        read_s = _read_s(dataset, found)
    samples_per_step = found.global_batch_size
    return StatisticsResult(
        source=found.data.source,
        sources=sources,
        seq_len=found.train.seq_len,
        sample_shapes=shapes_of(dataset.sample(0)) if dataset.num_training_samples else [],
        num_training_samples=dataset.num_training_samples,
        num_validation_samples=dataset.num_validation_samples,
        samples_per_step=samples_per_step,
        steps=found.train.steps,
        epochs=found.train.steps * samples_per_step / max(1, dataset.num_training_samples),
        read_s_per_step=read_s * samples_per_step,
    )


def _source(cache: TokenCache, seq_len: int, show: Callable[[str], None]) -> SourceStatistics:
    text = f"tokenising {cache.source}"
    show(text)
    tokens = cache.tokens(byte_counter(text, cache.content.num_bytes, show))
    show(f"counting the tokens of {cache.source}")
    found = _sizes(cache.source, cache.content, tokens, document_lengths(tokens, cache.encoder.end_of_text, seq_len))
    return found.replace(tokenize_bytes_per_s=_tokenize_rate(cache))


def _prepared_source(section: DataSection, seq_len: int) -> list[SourceStatistics]:
    prepared = None if is_object_source(section.source) else find_prepared(section)
    if prepared is None:
        return []
    tokens = prepared.read()
    lengths = document_lengths(tokens, prepared.tokenizer.end_of_text, seq_len)
    return [_sizes(section.source, prepared.content, tokens, lengths)]


def _sizes(source: str, content: Content, tokens: Tokens, lengths: DocumentLengths) -> SourceStatistics:
    counts = zip(lengths.num_documents, lengths.num_tokens, strict=True)
    bins = [
        LengthBin(from_tokens=2**i, to_tokens=2 ** (i + 1) - 1, num_documents=documents, num_tokens=in_bin)
        for i, (documents, in_bin) in enumerate(counts)
    ]
    return SourceStatistics(
        source=source,
        num_bytes=content.num_bytes,
        num_documents=content.num_documents,
        num_tokens=len(tokens),
        bytes_per_token=content.num_bytes / max(1, len(tokens)),
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
