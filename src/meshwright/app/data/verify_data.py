"""verify: read all data of a job, and say everything that is wrong with it."""

import time
from collections.abc import Callable
from typing import TypeAlias, cast

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.data.byte_counter import byte_counter
from meshwright.app.data.job_data import dataset_of, of_each, source_name
from meshwright.app.job.jobs import as_job
from meshwright.app.progress import elapsed
from meshwright.app.results.data_results import DataVerificationResult
from meshwright.data.corpus import Corpus
from meshwright.data.data_problems import problems
from meshwright.data.examine.sample_arrays import arrays_of
from meshwright.data.examine.sample_limits import SampleLimits, sample_limits
from meshwright.data.examine.source_check import SourceCheck, check_source
from meshwright.data.formats.stored_tokens import StoredTokens, hash_of_tokens
from meshwright.data.job_code import first_frame_of_job
from meshwright.data.numbered_samples import Sample
from meshwright.data.user_data import (
    UserData,
    is_stream,
    load_user_data,
    num_samples_of,
    read_pair,
    sample_digest,
)
from meshwright.errors import DataError, MeshwrightError, UnsupportedError
from meshwright.spec.data_findings import UnreadRest
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import place_of

_Read: TypeAlias = Callable[[int], Sample]


@checked
def verify(job: JobSource, *overrides: str, samples: Positive = 100) -> DataVerificationResult:
    """Return every file and record of the job's data that cannot be read, with place and reason.

    Token caches that are there are compared with their checksums, and `samples` samples, spread evenly, are read twice,
    which must give equal values: of text only where its tokens are in the cache. Those of a user's class must also
    be what a built-in model takes, as training requires.
    """
    found, start_s, total = as_job(job, overrides).job, time.perf_counter(), SourceCheck()
    name = source_name(found.data)
    with elapsed(f"reading {name}") as show:
        try:
            of_each(found, lambda corpus: _check_corpus(corpus, total, show))
        except MeshwrightError as error:
            total.add_problem(name, str(error))
        caches = [] if total.num_problems else _check_caches(found, total, show)
        if not total.num_problems and "absent" in caches:
            # What its tokens would say: whether there is enough to learn from, and what is too long.
            for problem in problems(found.data, found.train.seq_len, None, found.train.task):
                total.add_problem(name, problem)
        is_ready = not total.num_problems and "absent" not in caches
        num_samples, num_all_samples = _compare_reads(found, samples, total, show) if is_ready else (0, 0)
    return DataVerificationResult(
        source=name,
        num_files=total.num_files,
        unread=total.unread,
        unread_files=total.unread_files,
        num_empty_files=total.num_empty_files,
        num_documents=total.num_documents,
        num_bytes=total.num_bytes,
        num_problems=total.num_problems,
        problems=total.problems,
        caches=caches,
        num_samples=num_samples,
        num_all_samples=num_all_samples,
        duration_s=time.perf_counter() - start_s,
    )


def _check_corpus(corpus: Corpus, total: SourceCheck, show: Callable[[str], None]) -> None:
    source = corpus.section.source
    try:
        if corpus.is_text:
            check_source(corpus.section, total, byte_counter(f"reading {source}", None, show), corpus.encoding.reader)
        else:
            _check_tokens(corpus, total)
    except MeshwrightError as error:
        # Other sources of a mixture are read, too.
        total.add_problem(source, str(error))


def _check_tokens(corpus: Corpus, total: SourceCheck) -> None:
    """Read tokens that are there already, and raise DataError where they are not what they were."""
    found, source = corpus.tokens(), corpus.section.source
    if isinstance(found.tokens, StoredTokens):
        # Not as it was measured before.
        content_hash, _ = hash_of_tokens(found.tokens, source)
        if content_hash != found.content.content_hash:
            raise DataError(
                f"data.source = {source!r} was changed, though its sizes and times are the same: replace it"
            )
        if len(found.tokens.tokens) > len(found.tokens):
            max_bytes = corpus.section.max_bytes
            total.unread.append(UnreadRest(source=source, max_bytes=max_bytes, num_files=1, num_files_unread=0))
    total.num_files += 1
    total.num_documents += found.content.num_documents
    total.num_bytes += found.content.num_bytes


def _check_caches(job: Job, total: SourceCheck, show: Callable[[str], None]) -> list[str]:
    """Return the state of each token cache, and add those that are damaged to the problems."""
    states = []
    count = byte_counter(f"measuring {source_name(job.data)}", None, show)
    for cache in of_each(job, lambda corpus: corpus.cache(count) if corpus.is_text else None):
        if cache is None:
            continue
        show(f"reading {cache.path}")
        damaged = cache.damaged()
        for path in damaged:
            total.add_problem(
                f"{path}", "these are not the tokens that were written: `meshwright data prepare` makes them again"
            )
        states.append("damaged" if damaged else "intact" if cache.is_complete else "absent")
    return states


def _compare_reads(job: Job, most: int, total: SourceCheck, show: Callable[[str], None]) -> tuple[int, int]:
    """Return how many samples were read twice, and of how many; adds those that fail or differ to the problems."""
    readable: tuple[int, _Read] | None
    unbuilt: Exception | None = None
    try:
        dataset = dataset_of(job)
        readable = dataset.num_samples, dataset.read
    except Exception as error:
        # Reading sample by sample says which of them fail.
        unbuilt, readable = error, _samples_of_class(job, error)
    if readable is not None and not readable[0]:
        raise UnsupportedError(
            f"data.source = {job.data.source!r} is an iterable, whose samples have no numbers by which they could be "
            "read twice: verify it in a program, or give it an attribute `validation` with numbered ones"
        )
    num_samples, num_problems = readable[0] if readable else 0, total.num_problems
    count = min(most, num_samples)
    if readable is not None:
        _read_twice(job, readable, count, total, show)
    if unbuilt is not None and total.num_problems == num_problems:
        total.add_problem(source_name(job.data), _reason(job, unbuilt, num_samples))
    return count, num_samples


def _read_twice(
    job: Job, readable: tuple[int, _Read], count: int, total: SourceCheck, show: Callable[[str], None]
) -> None:
    """Read `count` samples, spread evenly, twice, and add those that fail or differ to the problems."""
    (num_samples, read), limits = readable, sample_limits(job)
    for done in range(count):
        index = done * (num_samples - 1) // max(1, count - 1)
        show(f"reading sample {index} of {num_samples}")
        try:
            problem = _problem(read, index, limits)
        except Exception as error:
            problem = _reason(job, error, num_samples)
        if problem is not None:
            total.add_problem(f"sample {index}", problem)


def _samples_of_class(job: Job, error: Exception) -> tuple[int, _Read] | None:
    """Return the number of samples of the class in data.source, and what reads one; None if `error` is not of them."""
    if isinstance(error, MeshwrightError) or first_frame_of_job(job, error) is None:
        return None
    source, data = job.data.source, load_user_data(job.data)
    if is_stream(data):
        return None
    numbered = cast(UserData, data)
    num_samples = num_samples_of(numbered, source)
    return num_samples, lambda index: read_pair(numbered, index, source)


def _problem(read: _Read, index: int, limits: SampleLimits | None) -> str | None:
    """Return that two reads of a sample differ; raises DataError where a model of tokens does not take it."""
    first, second = (read(index) for _ in range(2))
    if limits is not None:
        inputs, targets, *_ = arrays_of(first)
        limits.require(inputs[None], targets[None], [index])
    if sample_digest(first) != sample_digest(second):
        return "two reads give different values: make it a function of its number"
    return None


def _reason(job: Job, error: Exception, num_samples: int) -> str:
    """Return why `error` was raised; raises it again where it is neither explained nor of the class in data.source."""
    if isinstance(error, MeshwrightError):
        return str(error)
    if first_frame_of_job(job, error) is None:
        raise error
    length = f", though its __len__ says {num_samples}" if isinstance(error, IndexError) and num_samples else ""
    return f"data.source = {job.data.source!r} raised {place_of(error)}{length}: correct it"
