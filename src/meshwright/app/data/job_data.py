"""The dataset of a job, the order in which training reads it, and its corpora: as the trainer makes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from meshwright.data.corpus import Corpus, map_corpora
from meshwright.data.dataset import build_dataset
from meshwright.data.job_code import job_code_error
from meshwright.data.numbered_samples import Dataset, TrainingOrder
from meshwright.errors import MeshwrightError
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection

T = TypeVar("T")


def dataset_of(job: Job) -> Dataset:
    """Return the dataset, its text tokenised if needed; raises DataError or ConfigError as training would."""
    return build_dataset(job.data, job.train.seq_len, job.train.task)


def order_of(dataset: Dataset, job: Job) -> TrainingOrder:
    """Return which training sample is at each position of the run."""
    return dataset.order(job.train.seed, job.data.shuffle, job.global_batch_size)


def of_each(job: Job, take: Callable[[Corpus], T]) -> list[T]:
    """Return what `take` makes of each source of documents or tokens; an error about a table of a mixture names it."""
    return map_corpora(job.data, job.train.task, take)


@contextmanager
def errors_of_job_code(job: Job) -> Iterator[None]:
    """Raise MeshwrightError, which names the line, for an exception of the class in data.source, as training does."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        if (explained := job_code_error(job, error, "correct it")) is None:
            raise
        raise explained from error


def source_name(section: DataSection) -> str:
    """Return what data.source names, or the tables of a mixture."""
    if not section.mixture:
        return section.source
    return f"mixture of {', '.join(table.label for table in section.mixture)}"
