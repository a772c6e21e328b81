"""build_dataset: the one place where a job's [data] becomes a dataset."""

from typing import cast

from meshwright.data.corpus import Corpus, map_corpora
from meshwright.data.mixing.mixture_dataset import MixtureDataset
from meshwright.data.numbered_samples import Dataset
from meshwright.data.packing.packed_dataset import PackedDataset
from meshwright.data.packing.pair_dataset import PairDataset
from meshwright.data.packing.pair_mixture import PairMixture
from meshwright.data.streams.stream_dataset import StreamDataset
from meshwright.data.token_dataset import TokenDataset
from meshwright.data.user_data import UserData, is_stream, load_user_data
from meshwright.data.user_dataset import UserDataset
from meshwright.errors import ConfigError
from meshwright.spec.job.sections import DataSection, Task
from meshwright.spec.job.user_object import is_object_source


def build_dataset(section: DataSection, seq_len: int, task: Task = "pretrain") -> Dataset:
    """Return the dataset of a job's [data]; raises DataError or ConfigError if it is invalid or too short."""
    if is_object_source(section.source):
        problem = unmaskable(section)
        if problem:
            raise ConfigError(problem)
        data = load_user_data(section)
        return StreamDataset(section, data) if is_stream(data) else UserDataset(section, cast(UserData, data))
    sources = map_corpora(section, task, lambda corpus: _dataset_of(corpus, seq_len, task))
    mixed = PairMixture if task == "dpo" else MixtureDataset
    return mixed(section, sources) if section.mixture else sources[0]


def _dataset_of(corpus: Corpus, seq_len: int, task: Task) -> Dataset:
    kind = TokenDataset if corpus.section.packing == "split" else PairDataset if task == "dpo" else PackedDataset
    dataset = kind(corpus.section, seq_len, corpus.tokens())
    dataset.left_out = [*dataset.left_out, *corpus.unread_files]
    return dataset


def unmaskable(section: DataSection) -> str | None:
    """Return why data.mask_documents is invalid for this data; None if it is valid or off."""
    if not section.mask_documents or not is_object_source(section.source):
        return None
    return (
        f"data.mask_documents = true needs the tokens that end documents, but the samples of data.source = "
        f"{section.source!r} are its own and name none: set data.mask_documents to false, or data.source to a text"
    )
