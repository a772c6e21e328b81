"""The dataset of a job, the order in which training reads it, and its token caches: as the trainer makes them."""

from meshwright.data.cache import TokenCache
from meshwright.data.content import CountBytes
from meshwright.data.dataset import build_dataset, token_caches
from meshwright.data.numbered_samples import Dataset, TrainingOrder
from meshwright.spec.job.job import Job


def dataset_of(job: Job) -> Dataset:
    """Return the dataset, its text tokenised if needed; raises DataError or ConfigError as training would."""
    return build_dataset(job.data, job.train.seq_len, job.train.task)


def order_of(dataset: Dataset, job: Job) -> TrainingOrder:
    """Return which training sample is at each position of the run."""
    return dataset.order(job.train.seed, job.data.shuffle, job.global_batch_size)


def caches_of(job: Job, count_read: CountBytes | None = None) -> list[TokenCache]:
    """Return a token cache for each source of text, filled or not; `count_read` takes bytes that are read for that."""
    return token_caches(job.data, job.train.task, count_read)
