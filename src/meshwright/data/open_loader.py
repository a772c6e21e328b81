"""open_loader(): what reads the batches of a dataset, whichever it is."""

from meshwright.data.dataset import Dataset, StreamDataset
from meshwright.data.loader import Loader, Prefetch
from meshwright.data.order import Share
from meshwright.data.streams.stream_loader import StreamLoader
from meshwright.data.workers.sample_workers import SampleWorkers
from meshwright.spec.job.sections import DataSection


def open_loader(
    dataset: Dataset, share: Share, section: DataSection, *, seq_len: int, seed: int, pin_memory: bool
) -> Loader:
    """Return the loader of a rank's `share` of `dataset`, which is that of `section` where worker processes read it."""
    num_ahead = section.prefetch_batches
    if isinstance(dataset, StreamDataset):
        return StreamLoader(dataset, share, pin_memory=pin_memory, num_ahead=num_ahead)
    workers = SampleWorkers(section, seq_len) if section.num_workers else None
    prefetch = Prefetch(num_ahead, workers)
    return Loader(dataset, share, seed=seed, shuffle=section.shuffle, pin_memory=pin_memory, prefetch=prefetch)
