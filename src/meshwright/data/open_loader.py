"""open_loader(): what reads the batches of a dataset, whichever it is."""

from meshwright.data.examine.sample_limits import sample_limits
from meshwright.data.loader import Loader, Prefetch
from meshwright.data.numbered_samples import Dataset
from meshwright.data.order import Share
from meshwright.data.streams.stream_dataset import StreamDataset
from meshwright.data.streams.stream_loader import StreamLoader
from meshwright.data.workers.sample_workers import SampleWorkers
from meshwright.spec.job.job import Job


def open_loader(dataset: Dataset, share: Share, job: Job, *, pin_memory: bool = False) -> Loader:
    """Return the loader of a rank's `share` of `dataset`, which is that of `job` where worker processes read it."""
    loader = _loader_of(dataset, share, job, pin_memory)
    loader.limits = sample_limits(job)
    return loader


def _loader_of(dataset: Dataset, share: Share, job: Job, pin_memory: bool) -> Loader:
    section, train = job.data, job.train
    num_ahead = section.prefetch_batches
    if isinstance(dataset, StreamDataset):
        return StreamLoader(dataset, share, pin_memory=pin_memory, num_ahead=num_ahead)
    workers = SampleWorkers(section, train.seq_len, train.task) if section.num_workers else None
    prefetch = Prefetch(num_ahead, workers)
    return Loader(dataset, share, seed=train.seed, shuffle=section.shuffle, pin_memory=pin_memory, prefetch=prefetch)
