"""What blocks save for a budget of memory, from what each choice is measured to take."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InfeasibleLayout
from meshwright.simulator.memory.choose_checkpoints import Checkpoints, Need, choose_checkpoints
from meshwright.spec.layout.layout import ActivationCheckpoint

BYTES: dict[ActivationCheckpoint, int] = {"none": 100, "selective": 60, "full": 10}
"""Of a block's activations of one microbatch."""
WORK: dict[ActivationCheckpoint, float] = {"none": 0.0, "selective": 1.0, "full": 10.0}
BASE = 1000


class Model:
    """Pipeline ranks of some blocks each, that hold fewer microbatches the later they are."""

    def __init__(self, *blocks: int) -> None:
        starts = [sum(blocks[:rank]) for rank in range(len(blocks))]
        self.blocks_of_rank = [[*range(start, start + count)] for start, count in zip(starts, blocks, strict=True)]
        self.tried: list[Checkpoints] = []

    def peaks(self, saves: Checkpoints) -> list[int]:
        in_flight = range(len(self.blocks_of_rank), 0, -1)
        return [
            BASE + flying * sum(BYTES[saves[block]] for block in blocks)
            for flying, blocks in zip(in_flight, self.blocks_of_rank, strict=True)
        ]

    def measure(self, saves: Checkpoints) -> list[Need]:
        self.tried.append(saves)
        work = [sum(WORK[saves[block]] for block in blocks) for blocks in self.blocks_of_rank]
        return [Need(*need) for need in zip(self.peaks(saves), work, strict=True)]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1000, 6000))
def test_what_is_chosen_fits_and_one_block_less_would_not(blocks: list[int], budget: int) -> None:
    model = Model(*blocks)
    if max(model.peaks(("full",) * sum(blocks))) > budget:
        with pytest.raises(InfeasibleLayout):
            choose_checkpoints(model.blocks_of_rank, budget, model.measure)
        return
    saves = choose_checkpoints(model.blocks_of_rank, budget, model.measure)
    assert max(model.peaks(saves)) <= budget
    order: dict[ActivationCheckpoint, ActivationCheckpoint] = {"full": "selective", "selective": "none"}
    for rank, own in enumerate(model.blocks_of_rank):
        last = max((block for block in own if saves[block] == saves[own[0]]), default=own[0])
        if saves[last] in order:
            eased = (*saves[:last], order[saves[last]], *saves[last + 1 :])
            assert model.peaks(eased)[rank] > budget


def test_a_peak_that_is_no_line_is_searched_all_the_same() -> None:
    model = Model(32)
    tried = 0

    def measure(saves: Checkpoints) -> list[Need]:
        nonlocal tried
        tried += 1
        kept = sum(BYTES[kind] for kind in saves)
        return [Need(BASE + kept * kept // 1000, sum(WORK[kind] for kind in saves))]

    saves = choose_checkpoints(model.blocks_of_rank, 5000, measure)
    assert measure(saves)[0].peak_bytes <= 5000
    assert Counter(saves) == {"selective": 30, "none": 2}
    assert tried < 10


def test_the_first_ranks_of_a_pipeline_save_less() -> None:
    model = Model(4, 4, 4)
    saves = choose_checkpoints(model.blocks_of_rank, BASE + 500, model.measure)
    work = [need.recomputed for need in model.measure(saves)]
    assert work[0] > work[1] > work[2] == 0
    assert set(saves[8:]) == {"none"}


def test_what_fits_as_it_is_is_tried_once() -> None:
    model = Model(4)
    assert choose_checkpoints(model.blocks_of_rank, 10_000, model.measure) == ("none",) * 4
    assert len(model.tried) == 1


def test_selective_is_left_out_where_it_hardly_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BYTES, "selective", 99)
    model = Model(4)
    assert choose_checkpoints(model.blocks_of_rank, BASE + 320, model.measure) == ("full", "none", "none", "none")


def test_what_cannot_fit_names_the_numbers_and_keys() -> None:
    model = Model(4, 4)
    with pytest.raises(InfeasibleLayout, match=r"on pipeline rank 0 .*budget of .*layout.memory_budget_bytes to 1080 "):
        choose_checkpoints(model.blocks_of_rank, 1050, model.measure)


def test_a_budget_that_is_short_by_a_byte_is_named_in_bytes_and_the_advice_is_accepted() -> None:
    def measure(saves: Checkpoints) -> list[Need]:
        return [Need(2_769_000 + sum(BYTES[kind] for kind in saves), sum(WORK[kind] for kind in saves))]

    with pytest.raises(InfeasibleLayout, match=r"2,769,040 B of memory .* budget of 2,769,039 B: ") as refusal:
        choose_checkpoints([range(4)], 2_769_039, measure)
    advised = re.search(r"layout.memory_budget_bytes to (\d+) ", str(refusal.value))
    assert advised is not None
    assert choose_checkpoints([range(4)], int(advised[1]), measure) == ("full",) * 4
