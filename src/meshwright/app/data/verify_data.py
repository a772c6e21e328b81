"""verify: read all data of a job, and say everything that is wrong with it."""

import time
from collections.abc import Callable

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.data.byte_counter import byte_counter
from meshwright.app.data.job_data import caches_of, dataset_of
from meshwright.app.job.jobs import as_job
from meshwright.app.progress import elapsed
from meshwright.app.results.data_results import DataVerificationResult
from meshwright.data.corpus import corpora
from meshwright.data.examine.sample_arrays import digest_of
from meshwright.data.examine.source_check import SourceCheck, check_source
from meshwright.data.numbered_samples import Dataset
from meshwright.errors import MeshwrightError
from meshwright.spec.job.job import Job


@checked
def verify(job: JobSource, *overrides: str, samples: Positive = 100) -> DataVerificationResult:
    """Return every file and record of the job's data that cannot be read, with place and reason.

    Token caches that are there are compared with their checksums, and `samples` samples, spread evenly, are read twice,
    which must give equal values: of text only where its tokens are in the cache.
    """
    found, start_s, total = as_job(job, overrides).job, time.perf_counter(), SourceCheck()
    text = f"reading {found.data.source}"
    with elapsed(text) as show:
        for corpus in corpora(found.data, found.train.task):
            if corpus.is_text:
                check_source(corpus.section, total, byte_counter(text, None, show), corpus.encoding.reader)
        caches = [] if total.num_problems else _check_caches(found, total, show)
        is_ready = not total.num_problems and "absent" not in caches
        num_samples = _compare_reads(found, samples, total, show) if is_ready else 0
    return DataVerificationResult(
        source=found.data.source,
        num_files=total.num_files,
        num_empty_files=total.num_empty_files,
        num_documents=total.num_documents,
        num_bytes=total.num_bytes,
        num_problems=total.num_problems,
        problems=total.problems,
        caches=caches,
        num_samples=num_samples,
        duration_s=time.perf_counter() - start_s,
    )


def _check_caches(job: Job, total: SourceCheck, show: Callable[[str], None]) -> list[str]:
    """Return the state of each token cache, and add those that are damaged to the problems."""
    states = []
    for cache in caches_of(job, byte_counter(f"measuring {job.data.source}", None, show)):
        show(f"reading {cache.path}")
        damaged = cache.damaged()
        for path in damaged:
            total.add_problem(
                f"{path}", "these are not the tokens that were written: `meshwright data prepare` makes them again"
            )
        states.append("damaged" if damaged else "intact" if cache.is_complete else "absent")
    return states


def _compare_reads(job: Job, most: int, total: SourceCheck, show: Callable[[str], None]) -> int:
    """Return the number of samples that were read twice, having added those that fail or differ to the problems."""
    try:
        dataset = dataset_of(job)
    except MeshwrightError as error:
        total.add_problem(job.data.source, str(error))
        return 0
    num_samples = dataset.num_training_samples + dataset.num_validation_samples
    count = min(most, num_samples)
    for done in range(count):
        index = done * (num_samples - 1) // max(1, count - 1)
        show(f"reading sample {index} of {num_samples}")
        problem = _difference(dataset, index)
        if problem is not None:
            total.add_problem(f"sample {index}", problem)
    return count


def _difference(dataset: Dataset, index: int) -> str | None:
    try:
        first, second = (digest_of(dataset.read(index)) for _ in range(2))
    except Exception as error:  # of the user's code, too: every sample that fails is named
        return f"{type(error).__name__}: {error}"
    return None if first == second else "two reads give different values: make it a function of its number"
