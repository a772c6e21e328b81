"""Stages are split as well as can be: against every split there is, and what fits no split is refused by name."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.errors import InfeasibleLayout
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.stage_split import block_costs, split_stages, stage_boundaries
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS

SPEC = model_spec(PRESETS["llama3-8b"])


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    num_units = draw(st.integers(2, 9))
    costs = st.lists(st.integers(0, 6), min_size=num_units, max_size=num_units)
    return draw(costs), draw(costs), draw(st.integers(1, num_units))


def every_split(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations(range(num_blocks + 1), num_stages - 1)


def stage_costs(units: Sequence[float], boundaries: tuple[int, ...]) -> list[float]:
    cuts = [0, *(boundary + 1 for boundary in boundaries), len(units)]
    return [sum(units[start:stop]) for start, stop in itertools.pairwise(cuts)]


@settings(deadline=None)
@given(problems())
@example(([0, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 1], 2))
def test_no_split_is_better(problem: tuple[list[int], list[int], int]) -> None:
    times, sizes, num_stages = problem

    def badness(boundaries: tuple[int, ...]) -> tuple[object, ...]:
        own = stage_costs(times, boundaries)
        # On ties the first boundary is the least, then the second, and so on: later stages get more.
        return max(own), max(stage_costs(sizes, boundaries)), sum(time**2 for time in own), boundaries

    assert split_stages(times, sizes, num_stages) == min(every_split(len(times) - 2, num_stages), key=badness)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.integers(1, 8))
def test_floats_split_as_well(times: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(times))
    found = stage_costs(times, split_stages(times, times, num_stages))
    best = min(max(stage_costs(times, split)) for split in every_split(len(times) - 2, num_stages))
    assert max(found) <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    ("times", "num_stages", "boundaries"),
    [
        ([0, 1, 1, 1, 1, 1, 1, 1, 1, 0], 4, (2, 4, 6)),
        # What does not divide goes to later stages, which hold fewer microbatches.
        ([0, 1, 1, 1, 1, 1, 0], 2, (2,)),
        # A head that takes as long as two blocks takes their place; a longer one is alone.
        ([0, 1, 1, 1, 1, 1, 1, 2], 4, (2, 4, 6)),
        ([0, 1, 1, 1, 1, 1, 1, 9], 3, (3, 6)),
        # Dense blocks in front that are cheaper than the others.
        ([0, 1, 1, 1, 3, 3, 3, 0], 4, (3, 4, 5)),
        # An embedding and a head may have a stage for themselves.
        ([0, 1, 1, 0], 4, (0, 1, 2)),
        ([0, 1, 1, 0], 1, ()),
    ],
)
def test_splits_by_hand(times: list[int], num_stages: int, boundaries: tuple[int, ...]) -> None:
    assert split_stages(times, [1] * len(times), num_stages) == boundaries


def test_too_few_blocks_are_said() -> None:
    with pytest.raises(InfeasibleLayout, match=r"3 blocks cannot be split into 6 stages .* take 5 stages or fewer"):
        split_stages([1] * 5, [1] * 5, 6)


def test_costs_are_the_models() -> None:
    times, sizes = block_costs(SPEC, seq_len=8192)
    assert len(times) == len(sizes) == 34
    assert 3 * sum(times) == SPEC.flops_per_token(8192)
    assert sum(sizes) == 4 * SPEC.num_parameters
    assert times[0] == 0
    # 2 x (128,256 x 4096) for the head; 4 x 4096 x 8192 / 2 of attention among a block's.
    assert times[-1] == 2 * 128_256 * 4096
    assert times[1] == 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 2 * 4096 * 8192


def test_a_tied_head_weighs_its_copy() -> None:
    architecture = PRESETS["llama3.2-1b"]
    assert architecture.tie_embeddings
    _, sizes = block_costs(model_spec(architecture), seq_len=8192)
    assert sizes[-1] == 4 * (architecture.vocab_size + 1) * architecture.dim
    _, sizes_of_sparse = block_costs(model_spec(PRESETS["deepseek-v3"]), seq_len=4096)
    assert sum(sizes_of_sparse) == 4 * model_spec(PRESETS["deepseek-v3"]).num_parameters
    assert sizes_of_sparse[1] < sizes_of_sparse[4]


def test_a_split_is_asked_for_or_found() -> None:
    layout = Layout(pp=4)
    # The head takes a little longer than two blocks, the embedding no time.
    assert stage_boundaries(layout, SPEC, seq_len=8192) == (8, 17, 26)
    assert stage_boundaries(layout.replace(stage_boundaries=(1, 2, 32)), SPEC, seq_len=8192) == (1, 2, 32)
    assert stage_boundaries(Layout(), SPEC, seq_len=8192) == ()
