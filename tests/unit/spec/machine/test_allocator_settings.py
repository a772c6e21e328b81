"""The allocator's settings: the trainer's own, unless a user has set some."""

import pytest

from meshwright.spec.machine.allocator_settings import (
    allocator_notes,
    allocator_settings,
    has_expandable_segments,
    set_allocator,
)


def test_the_trainer_lets_segments_grow() -> None:
    environment: dict[str, str] = {}
    assert not has_expandable_segments(environment)
    set_allocator(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert has_expandable_segments(environment)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("text", "grows"),
    [
        ("expandable_segments:False", False),
        ("max_split_size_mb:128", False),
        ("max_split_size_mb:128, expandable_segments:True", True),
    ],
)
def test_what_a_user_sets_stays(name: str, text: str, grows: bool) -> None:
    environment = {name: text}
    set_allocator(environment)
    assert environment == {name: text}
    assert has_expandable_segments(environment) == grows


def test_each_setting_is_explained_with_its_value_and_who_set_it() -> None:
    ours = {one.name: one.value for one in allocator_settings({})}
    assert ours["expandable_segments"] == "True, set by `meshwright train`"
    assert {value for name, value in ours.items() if name != "expandable_segments"} == {"not set"}
    given = {
        one.name: one for one in allocator_settings({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,backend:native"})
    }
    assert given["max_split_size_mb"].value == "128, set by PYTORCH_ALLOC_CONF"
    assert given["expandable_segments"].value.startswith("False, torch's default (PYTORCH_ALLOC_CONF is set without it")
    assert "2.12 times" in given["expandable_segments"].effect
    (grows, *_) = allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert grows.value == "True, set by PYTORCH_CUDA_ALLOC_CONF"


def test_a_stranger_reads_what_fragmentation_is_what_is_set_and_when_to_change_it() -> None:
    (first, meaning), *each, (last, command) = allocator_notes({})
    assert first == "fragmentation"
    assert "`reserved but unallocated`" in meaning
    assert [name for name, _ in each] == [one.name for one in allocator_settings({})]
    assert all(". Set it" in text for _, text in each)
    assert last == "to change one"
    assert "set PYTORCH_ALLOC_CONF" in command
