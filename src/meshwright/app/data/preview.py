"""preview: the samples of a job as the text that a step learns from."""

from collections.abc import Sequence

import numpy as np

from meshwright.app.arguments import Count, JobSource, Positive, checked
from meshwright.app.data.job_data import dataset_of, errors_of_job_code, of_each, order_of, source_name
from meshwright.app.job.jobs import as_job
from meshwright.app.progress import elapsed
from meshwright.app.results.data_results import PreviewResult
from meshwright.data.corpus import Corpus
from meshwright.data.examine.document_places import document_numbers, document_places
from meshwright.data.examine.sample_arrays import arrays_of, shapes_of
from meshwright.data.examine.sample_text import segments_of
from meshwright.data.mixing.mixture_dataset import MixtureDataset
from meshwright.data.numbered_samples import IGNORED, Dataset
from meshwright.data.packing.packed_dataset import PackedDataset
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import ConfigError
from meshwright.spec.data_findings import SamplePreview
from meshwright.spec.job.job import Job


@checked
def preview(
    job: JobSource, *overrides: str, step: Positive | None = None, sample: Count | None = None, count: Positive = 2
) -> PreviewResult:
    """Return `count` samples: the first ones that `step` (from 1, as in the log; None: 1) reads, or those from number
    `sample` on.
    """
    if step is not None and sample is not None:
        raise ConfigError(f"--step {step} and --sample {sample} both say which samples: give one of the two")
    found = as_job(job, overrides).job
    with errors_of_job_code(found), elapsed(f"reading {source_name(found.data)}"):
        dataset = dataset_of(found)
        _require_samples(dataset, found, sample)
        if sample is None:
            indices = _indices_of_step(dataset, found, step or 1)[:count]
        else:
            indices = list(range(sample, min(sample + count, dataset.num_training_samples)))
        samples = _previews(dataset, found, indices)
    if sample is None:
        samples = [one.replace(slot=slot) for slot, one in enumerate(samples)]
    return PreviewResult(source=source_name(found.data), step=(step or 1) if sample is None else None, samples=samples)


def _require_samples(dataset: Dataset, job: Job, sample: int | None) -> None:
    num_samples = dataset.num_training_samples
    if not num_samples:
        raise ConfigError(
            f"data.source = {job.data.source!r} is an iterable, without numbered samples to show: read it in a program"
        )
    if sample is not None and sample >= num_samples:
        raise ConfigError(f"--sample {sample} must be less than the {num_samples} training samples: change it")


def _indices_of_step(dataset: Dataset, job: Job, step: int) -> list[int]:
    order = order_of(dataset, job)
    first = (step - 1) * job.global_batch_size
    return [int(index) for index in order.samples_at(np.arange(first, first + job.global_batch_size))]


def _previews(dataset: Dataset, job: Job, indices: Sequence[int]) -> list[SamplePreview]:
    tokenizer = None if dataset.vocab_size is None else load_tokenizer(job.data.tokenizer)
    found, holds_pairs = [], dataset.num_pairs > 0
    learns_all = job.train.task == "pretrain" or (job.train.task == "sft" and job.data.train_on == "all")
    for index, places in zip(indices, _places(dataset, job, indices), strict=True):
        whole = dataset.sample(index)
        # Of a padded row, what is before the padding.
        length = _num_inputs(dataset, index)
        sample = tuple(part[:length] for part in arrays_of(whole)) if tokenizer else whole
        targets = arrays_of(whole)[1]
        num_ignored = int(np.count_nonzero(targets == IGNORED)) if dataset.may_ignore_targets else 0
        found.append(
            SamplePreview(
                sample=index,
                shapes=shapes_of(whole),
                segments=[]
                if tokenizer is None
                else segments_of(sample, tokenizer, holds_pairs=holds_pairs, joins_first=learns_all),
                num_targets=targets.size - num_ignored,
                num_ignored=num_ignored,
                places=places,
            )
        )
    return found


def _num_inputs(dataset: Dataset, index: int) -> int | None:
    """Return the inputs of a sample before its padding; None where it has none."""
    if isinstance(dataset, MixtureDataset):
        number, own = dataset.place_of(index)
        return _num_inputs(dataset.sources[number], own)
    return dataset.num_inputs(index) if isinstance(dataset, PackedDataset) else None


def _places(dataset: Dataset, job: Job, indices: Sequence[int]) -> list[list[str]]:
    """Return where the documents of each sample are from; [] where that is not found at little cost.

    It is of one text, or source of records; of a mixture it is the source alone.
    """
    if isinstance(dataset, MixtureDataset):
        return [[job.data.mixture[dataset.place_of(index)[0]].label] for index in indices]
    corpora = of_each(job, lambda one: one)
    if not corpora or not corpora[0].is_text:
        return [[] for _ in indices]
    numbers = _documents_of(dataset, corpora[0], job.train.seq_len, indices)
    places = document_places(corpora[0], max((number for one in numbers for number in one), default=-1))
    # What is too far into the source is not looked for.
    return [[places[number] for number in one] if max(one, default=0) < len(places) else [] for one in numbers]


def _documents_of(dataset: Dataset, corpus: Corpus, seq_len: int, indices: Sequence[int]) -> list[Sequence[int]]:
    """Return the numbers of the documents that each sample of a text or of records is of; none without tokens."""
    if isinstance(dataset, PackedDataset):
        return [dataset.documents_of(index) for index in indices]
    cache = corpus.cache()
    if (tokens := cache.open()) is None:
        return [[] for _ in indices]
    starts, end_of_text = [index * seq_len for index in indices], cache.encoder.end_of_text
    return [document_numbers(tokens, start, start + seq_len + 1, end_of_text) for start in starts]
