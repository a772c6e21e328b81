"""The allocator's settings: the trainer's own, unless a user has set some."""

import pytest

from meshwright.spec.machine.allocator_settings import allocator_notes, has_expandable_segments, set_allocator


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


def test_each_setting_that_bears_on_fragmentation_is_explained() -> None:
    (ours,) = allocator_notes({})
    assert ours.startswith("expandable_segments:True, which train sets: ")
    fixed, split = allocator_notes({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,backend:native"})
    assert fixed.startswith("fixed segments: a freed block seldom serves another size")
    assert split.startswith("max_split_size_mb:128: larger blocks are not split")
    (grows,) = allocator_notes({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert grows.startswith("expandable_segments:True: ")
