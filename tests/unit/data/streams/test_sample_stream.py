import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.streams.sample_stream import SampleStream
from meshwright.data.user_data import sample_digest
from meshwright.errors import ConfigError, DataError
from meshwright.spec.job.sections import DataSection


def stream(name: str, **options: Any) -> SampleStream:
    return SampleStream(DataSection(source=f"sample_sources:{name}", options=options))


def read(source: SampleStream, count: int) -> list[str]:
    return [sample_digest(source.read()) for _ in range(count)]


@given(name=st.sampled_from(["Counting", "Iterable", "generated"]), length=st.integers(1, 9), at=st.integers(0, 30))
def test_a_restored_stream_continues_as_one_that_never_stopped(name: str, length: int, at: int) -> None:
    expected = read(stream(name, length=length), 40)
    first = stream(name, length=length)
    assert read(first, at) == expected[:at]
    position = json.loads(json.dumps(first.position()))
    assert (position["num_samples"], position["num_in_epoch"]) == (at, at - length * position["epoch"])
    # Also by one that has been elsewhere, as in a rollback.
    for second in (stream(name, length=length), first):
        second.restore(position)
        assert read(second, 40 - at) == expected[at:]


def test_a_state_is_loaded_and_nothing_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    first = stream("Counting")
    read(first, 35)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="meshwright"):
        stream("Counting").restore(first.position())
        assert not caplog.messages
        without = stream("Iterable")
        read(without, 20)
        stream("Iterable").restore(without.position())
    assert caplog.messages[-1].endswith("its first 20 samples are read again, to where the checkpoint was")


def test_epochs_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    source = stream("generated", length=4)
    with caplog.at_level(logging.INFO, logger="meshwright"):
        samples = read(source, 10)
    assert samples[:4] == samples[4:8]
    assert [message.partition("ended ")[2] for message in caplog.messages] == [
        "after 4 samples: epoch 2 begins",
        "after 8 samples: epoch 3 begins",
    ]


def test_a_stream_that_gives_other_samples_than_before_is_refused() -> None:
    source = stream("restless")
    read(source, 5)
    with pytest.raises(DataError, match=r"gives another sample 4 than before the checkpoint"):
        stream("restless").restore(source.position())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Once", {}, r"ended after 10 samples, and has none when it is begun again: let it give more, or lower"),
        ("generated", {"length": 0}, r"ended without a sample: let it give more"),
    ],
)
def test_a_stream_without_more_samples_says_how_many_there_were(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(stream(name, **options), 11)


def test_an_unsavable_state_is_named() -> None:
    source = stream("UnsavableState")
    read(source, 1)
    with pytest.raises(DataError, match=r"state_dict\(\)\['nested'\]\[0\]\['file'\]"):
        source.position()


def test_a_state_needs_who_loads_it() -> None:
    with pytest.raises(ConfigError, match=r"one of state_dict\(\) and load_state_dict\(\)"):
        stream("HalfStateful")
    saved = stream("Counting")
    read(saved, 3)
    with pytest.raises(DataError, match=r"no load_state_dict\(\) any more"):
        stream("Iterable").restore(saved.position())
