"""Every schedule runs each microbatch once each way on each stage, ends, and holds no more than it should."""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.spec.layout.layout import LOOPED_SCHEDULES, SCHEDULES, SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.layout.schedule.action import Action, parse_action, parse_cell
from meshwright.spec.layout.schedule.schedule import Schedule, build_schedule, check_schedule, lower
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems
from schedules import peak_in_flight


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Layout, Schedule]:
    name = draw(st.sampled_from(SCHEDULES))
    layout = Layout(
        pp=draw(st.integers(1, 5)),
        schedule=name,
        virtual_stages=draw(st.integers(1, 3)) if name in LOOPED_SCHEDULES else None,
    )
    num_microbatches = draw(st.integers(1, 12))
    assume(not schedule_problems(layout, num_microbatches))
    schedule = build_schedule(layout, num_microbatches)
    assert (schedule.num_stages, schedule.num_microbatches) == (layout.num_stages, num_microbatches)
    return layout, schedule


def schedule_of(*rows: str) -> Schedule:
    return Schedule(actions=tuple(tuple(parse_action(text) for text in row.split()) for row in rows))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(schedules())
def test_each_microbatch_runs_once_each_way_on_each_stage(case: tuple[Layout, Schedule]) -> None:
    layout, schedule = case
    counts = Counter(action for order in schedule.actions for action in order)
    assert set(counts.values()) == {1}
    for stage, microbatch in itertools.product(range(layout.num_stages), range(schedule.num_microbatches)):
        kinds = {kind for kind, on, number in counts if (on, number) == (stage, microbatch)}
        assert kinds in ({"F", "B"}, {"F", "I", "W"})
        assert "W" not in kinds or layout.schedule in SPLIT_BACKWARD_SCHEDULES
    check_schedule(schedule)


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_stages_lie_where_the_layout_says(case: tuple[Layout, Schedule]) -> None:
    layout, schedule = case
    for rank in range(layout.pp):
        is_v = layout.schedule in V_SCHEDULES and layout.pp > 1
        mirrored = (rank, layout.num_stages - 1 - rank)
        assert schedule.stages_of_rank(rank) == (mirrored if is_v else tuple(range(rank, layout.num_stages, layout.pp)))
        assert all(schedule.rank_of_stage(stage) == rank for stage in schedule.stages_of_rank(rank))


def peer_of(action: Action, schedule: Schedule) -> int:
    """Return the rank at the other end of a transfer."""
    is_to_next = action.kind in ("SEND_F", "RECV_B")
    return schedule.rank_of_stage(action.stage + (1 if is_to_next else -1))


def run_blocking(schedule: Schedule, lowered: list[list[Action]]) -> list[Action]:
    """Return all computations in an order in which they can run if every send blocks until its receive is posted.

    A rank's action needs what it has received or made itself; nothing else is known to it.
    """
    computed: list[Action] = []
    posted: set[Action] = set()
    held: list[set[tuple[str, int, int]]] = [set() for _ in lowered]
    at = [0] * len(lowered)

    def next_of(rank: int) -> Action | None:
        return lowered[rank][at[rank]] if at[rank] < len(lowered[rank]) else None

    has_moved = True
    while has_moved:
        has_moved = False
        for rank in range(len(lowered)):
            action = next_of(rank)
            if action is None:
                continue
            kind, stage, microbatch = action
            if kind.startswith("RECV"):
                posted.add(action)
            elif kind.startswith("SEND"):
                peer = peer_of(action, schedule)
                target = stage + (1 if kind == "SEND_F" else -1)
                received = Action("RECV_F" if kind == "SEND_F" else "RECV_B", target, microbatch)
                assert kind[-1:] + "_out" in {name for name, on, number in held[rank] if (on, number) == action[1:]}
                if received not in posted:
                    continue
                held[peer].add((kind[-1:] + "_in", target, microbatch))
            elif not is_ready(action, schedule, held[rank]):
                continue
            else:
                compute(action, schedule, held[rank])
                computed.append(action)
            at[rank] += 1
            has_moved = True
    assert at == [len(order) for order in lowered], "ranks wait for each other in a circle"
    return computed


def is_ready(action: Action, schedule: Schedule, held: set[tuple[str, int, int]]) -> bool:
    """Return whether what `action` receives has arrived."""
    kind, stage, microbatch = action
    is_first, is_last = stage == 0, stage == schedule.num_stages - 1
    if kind == "W" or (is_first if kind == "F" else is_last):
        return True
    made = ("F_out", stage - 1, microbatch) if kind == "F" else ("B_out", stage + 1, microbatch)
    return bool({(made[0][0] + "_in", stage, microbatch), made} & held)


def compute(action: Action, schedule: Schedule, held: set[tuple[str, int, int]]) -> None:
    kind, stage, microbatch = action
    is_forward, is_last = kind == "F", stage == schedule.num_stages - 1
    if is_forward:
        assert stage == 0 or {("F_in", stage, microbatch), ("F_out", stage - 1, microbatch)} & held, action
    else:
        assert ("F_out", stage, microbatch) in held, action
    if kind == "W":
        assert ("B_out", stage, microbatch) in held, action
    elif not is_forward:
        assert is_last or {("B_in", stage, microbatch), ("B_out", stage + 1, microbatch)} & held, action
    held.add(("F_out" if is_forward else "B_out", stage, microbatch))


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_even_blocking_sends_end_and_every_input_is_there(case: tuple[Layout, Schedule]) -> None:
    _, schedule = case
    lowered = lower(schedule)
    computed = run_blocking(schedule, lowered)
    assert Counter(computed) == Counter(action for order in schedule.actions for action in order)
    for order, with_transfers in zip(schedule.actions, lowered, strict=True):
        assert [action for action in with_transfers if action.kind in ("F", "B", "I", "W")] == list(order)


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_both_ends_of_every_pair_of_ranks_list_its_transfers_in_one_order(case: tuple[Layout, Schedule]) -> None:
    _, schedule = case
    lowered = lower(schedule)
    shift = {"SEND_F": 1, "SEND_B": -1, "RECV_F": -1, "RECV_B": 1}
    for one, other in itertools.combinations(range(len(lowered)), 2):
        of_one, of_other = (
            [
                (action.kind[-1:], action.microbatch, min(action.stage, action.stage + shift[action.kind]))
                for action in lowered[rank]
                if action.kind in shift and peer_of(action, schedule) == peer
            ]
            for rank, peer in ((one, other), (other, one))
        )
        assert of_one == of_other


def test_stages_on_one_rank_hand_over_without_a_transfer() -> None:
    lowered = lower(build_schedule(Layout(pp=2, schedule="ZBVZeroBubble"), 4))
    transfers = {action for order in lowered for action in order if "_" in action.kind}
    assert {action.stage for action in transfers if action.kind == "SEND_F"} == {0, 2}
    assert {action.stage for action in transfers if action.kind == "SEND_B"} == {1, 3}
    assert not any("_" in action.kind for order in lower(build_schedule(Layout(), 3)) for action in order)


def test_a_lowered_schedule_by_hand() -> None:
    lowered = lower(build_schedule(Layout(pp=2), 2))
    assert [" ".join(str(action) for action in order) for order in lowered] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_receives_are_posted_while_the_computation_before_them_runs() -> None:
    layout = Layout(pp=4, schedule="Interleaved1F1B", virtual_stages=2)
    for order in lower(build_schedule(layout, 8))[1:]:
        late = [
            after
            for before, receive, after in zip(order, order[1:], order[2:], strict=False)
            if receive.kind.startswith("RECV") and after == Action(receive.kind[-1:], receive.stage, receive.microbatch)
        ]
        # The first microbatch has nothing to be hidden behind.
        assert len(late) <= 2, late


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 20))
def test_1f1b_holds_at_most_as_many_microbatches_as_ranks_are_left(pp: int, num_microbatches: int) -> None:
    assume(num_microbatches >= pp)
    layout = Layout(pp=pp)
    assert peak_in_flight(build_schedule(layout, num_microbatches)) == tuple(pp - rank for rank in range(pp))
    if pp > 1:
        held = peak_in_flight(build_schedule(layout.replace(schedule="GPipe"), num_microbatches))
        assert held == (num_microbatches,) * pp


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_what_is_held_has_a_bound(case: tuple[Layout, Schedule]) -> None:
    layout, schedule = case
    pp, per_rank, peak = layout.pp, layout.stages_per_rank, peak_in_flight(schedule)
    everything = per_rank * schedule.num_microbatches
    bounds = {
        "GPipe": everything,
        "LoopedBFS": everything,
        "1F1B": pp,
        # Rounds may be nearly twice as long as there are ranks.
        "Interleaved1F1B": (per_rank - 1) * (2 * pp - 1) + 2 * (pp - 1) + 1,
        "InterleavedZeroBubble": (per_rank - 1) * (2 * pp - 1) + pp,
        # That of 1F1B's first rank, on every rank: its stages are half as long.
        "ZBVZeroBubble": 2 * pp,
        "DualPipeV": 2 * pp + 1,
    }
    bound = 1 if pp == 1 else bounds[layout.schedule]
    assert max(peak) <= min(bound, everything)


def test_one_rank_runs_forward_and_backward_in_turn() -> None:
    for name in SCHEDULES:
        (order,) = build_schedule(Layout(schedule=name), 3).actions
        assert " ".join(str(action) for action in order) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_a_schedule_is_a_noun() -> None:
    schedule = build_schedule(Layout(pp=2, schedule="DualPipeV"), 4)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert isinstance(Schedule.from_json(schedule.to_json()).actions[0][0], Action)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (["0F0 0B0", "1F0"], "stage 1 runs microbatch 0 F 1 times, B 0 times, I 0 times, W 0 times: it needs F once"),
        (["0F0 0B0", "1F0 1F0 1B0"], "stage 1 runs microbatch 0 F 2 times"),
        (["0F0 0I0", "1F0 1B0"], "stage 0 runs microbatch 0 .* B 0 times, I 1 times, W 0 times"),
        (["0F0 0B0 0I0 0W0", "1F0 1B0"], "stage 0 runs microbatch 0 F 1 times, B 1 times, I 1 times, W 1 times"),
        (["0F0 0F2 0B0 0B2", "1F0 1F2 1B0 1B2"], "stage 0 runs microbatch 1 F 0 times"),
        (["0F0 0B0", "2F0 2B0"], "stage 1 is on pipeline ranks none"),
        (["0F0 0B0 1F0", "1B0"], "stage 1 is on pipeline ranks 0 and 1: put all its actions in one row"),
        (["0B0 0F0"], "no pipeline rank can go on, .*: rank 0 before 0B0"),
        (["0F0 0W0 0I0"], "no pipeline rank can go on, .*: rank 0 before 0W0"),
        (["0F0 0B0 2F0 2B0", "1F0 1B0 3F0 3B0"], "can go on, .*: rank 0 before 0B0, rank 1 before 1B0"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "can go on, .*: rank 0 before 0B0, rank 1 before 1F1"),
    ],
)
def test_what_is_no_schedule(rows: list[str], problem: str) -> None:
    schedule = schedule_of(*rows)
    with pytest.raises(ConfigError, match=problem):
        check_schedule(schedule)


def test_microbatches_may_come_in_any_order() -> None:
    schedule = schedule_of("0F0 0F1 0B1 0B0", "1F1 1F0 1I1 1B0 1W1")
    check_schedule(schedule)
    run_blocking(schedule, lower(schedule))
    assert peak_in_flight(schedule) == (2, 2)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]), st.integers(0), st.integers(0))
def test_an_action_is_written_and_read(kind: str, stage: int, microbatch: int) -> None:
    text = f"{stage}{kind}{microbatch}"
    assert parse_action(text) == (kind, stage, microbatch)
    assert str(parse_action(text)) == text


def test_a_cell_holds_none_one_or_an_overlapped_pair() -> None:
    assert parse_cell(" ") == ()
    assert parse_cell(" 2W1 ") == (("W", 2, 1),)
    assert parse_cell("(0F4;3B1)OVERLAP_F_B") == (("F", 0, 4), ("B", 3, 1))


@pytest.mark.parametrize("text", ["F0", "0F", "0X1", "-1F0", "0f0", "0UNSHARD", "(0F4;3B1)", "0F0;1F0", "x"])
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ConfigError, match="is no action of a pipeline: write the stage"):
        parse_cell(text)


@given(schedules(), st.data())
def test_some_microbatches_of_a_schedule_are_a_schedule_in_the_same_order(
    case: tuple[Layout, Schedule], data: st.DataObject
) -> None:
    _, schedule = case
    some = sorted(data.draw(st.sets(st.integers(0, schedule.num_microbatches - 1), min_size=1)))
    part = schedule.of_microbatches(some)
    check_schedule(part)
    for order, whole in zip(part.actions, schedule.actions, strict=True):
        named = [action._replace(microbatch=some[action.microbatch]) for action in order]
        assert named == [action for action in whole if action.microbatch in some]
