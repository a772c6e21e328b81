import threading
from typing import Any

import pytest

from meshwright.data.dataset import build_dataset
from meshwright.data.loader import Loader, Microbatch
from meshwright.data.open_loader import open_loader
from meshwright.data.order import Share
from meshwright.data.streams.stream_dataset import StreamDataset
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection, TrainSection


def loader(name: str, share: Share, num_ahead: int = 2, **options: Any) -> Loader:
    section = DataSection(source=f"sample_sources:{name}", options=options, prefetch_batches=num_ahead)
    return open_loader(build_dataset(section, 32), share, Job(data=section, train=TrainSection(seq_len=32)))


def first_tokens(batches: list[Microbatch]) -> list[list[int]]:
    return [batch.inputs[:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("num_ahead", [1, 4])
def test_slots_of_consecutive_batches(num_ahead: int) -> None:
    reader = loader("generated", Share(8, 2, 1, 2), num_ahead)
    found = [first_tokens(reader.microbatches(step)) for step in range(3)]
    assert found == [[[2, 3], [6, 7]], [[10, 11], [14, 15]], [[18, 19], [22, 23]]]
    reader.close()


@pytest.mark.parametrize("name", ["Counting", "generated"])
def test_the_position_is_that_of_the_last_batch_in_use(name: str) -> None:
    reader = loader(name, Share(4), length=100)
    assert reader.position["stream"]["num_samples"] == 0
    for step in range(3):
        reader.microbatches(step)
    position = reader.position
    assert position["stream"]["num_samples"] == 12
    expected = first_tokens(reader.microbatches(3))
    # Of another number of ranks, then back in the one that is ahead.
    other = loader(name, Share(4, 4), length=100)
    other.restore(position)
    assert other.position == position
    assert first_tokens(other.microbatches(3)) == [[token for batch in expected for token in batch]]
    reader.restore(position)
    assert first_tokens(reader.microbatches(3)) == expected
    # As a rollback of a guard that leaves batches out.
    reader.restore(position)
    assert first_tokens(reader.microbatches(6)) == [[24], [25], [26], [27]]
    for each in (reader, other):
        each.close()


def test_a_failed_stream_fails_again_and_begins_no_epoch() -> None:
    reader = loader("generated", Share(4), bad=6)
    reader.microbatches(0)
    for step in (1, 2):
        with pytest.raises(ValueError, match="record 6 is bad"):
            reader.microbatches(step)
    reader.close()


def test_a_stream_that_ends_its_process_is_an_error_that_names_the_place() -> None:
    reader = loader("generated", Share(4), exits_at=6)
    reader.microbatches(0)
    for step in (1, 2):
        with pytest.raises(MeshwrightError, match=r"reading sample 6 of .* raised SystemExit: 0 \(.*sample_sources.py"):
            reader.microbatches(step)
    reader.close()


def test_validation_samples_are_an_attribute() -> None:
    reader = loader("Validated", Share(4, 2))
    reader.microbatches(0)
    assert reader.num_validation_batches == 3
    assert first_tokens(reader.validation_microbatches(1)) == [[4, 5], [6, 7]]
    reader.close()
    assert loader("Counting", Share(4)).num_validation_batches == 0


def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    reader = loader("generated", Share(4))
    reader.microbatches(0)
    reader.close()
    reader.close()
    assert threading.active_count() == before


def test_a_stream_takes_no_workers_of_ours() -> None:
    with pytest.raises(ConfigError, match=r"data.num_workers = 2 .* is an iterable: set data.num_workers to 0"):
        build_dataset(DataSection(source="sample_sources:Counting", num_workers=2), 32)


def test_the_object_that_was_built_is_the_first_to_be_read() -> None:
    dataset = build_dataset(DataSection(source="sample_sources:Counting"), 32)
    assert isinstance(dataset, StreamDataset)
    assert dataset.take_data() is not None
    assert dataset.take_data() is None
