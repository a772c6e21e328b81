"""Which copy in memory is taken: the newest that the nodes which are left can put together, whichever are lost."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint.memory.choose_copy import Held, choose, without
from meshwright.checkpoint.memory.nodes import Nodes

SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=5)


def nodes_of(sizes: list[int]) -> Nodes:
    return Nodes(tuple(f"node{node}" for node, size in enumerate(sizes) for _ in range(size)))


def held_by_all(nodes: Nodes, step: int, save_id: str = "a") -> list[list[Held]]:
    """Return what each node holds once a copy of all ranks is complete."""
    num_nodes, num_ranks = len(nodes.names), len(nodes.hosts)
    files: list[set[int]] = [set(nodes.ranks_of(node)) for node in range(num_nodes)]
    for rank in range(num_ranks):
        if (target := nodes.target_of(rank)) is not None:
            files[nodes.node_of(target)].add(rank)
    return [[Held(step, save_id, num_ranks, frozenset(own))] for own in files]


@given(SIZES)
def test_each_rank_sends_to_the_next_node_which_expects_it(sizes: list[int]) -> None:
    nodes = nodes_of(sizes)
    for rank in range(len(nodes.hosts)):
        target = nodes.target_of(rank)
        if len(sizes) == 1:
            assert target is None
        else:
            assert target is not None
            assert nodes.node_of(target) == (nodes.node_of(rank) + 1) % len(sizes)
            assert rank in nodes.sources_of(target)
    assert sum(len(nodes.sources_of(rank)) for rank in range(len(nodes.hosts))) == (sum(sizes) if sizes[1:] else 0)


@given(SIZES, st.data())
def test_a_copy_survives_exactly_the_losses_that_leave_every_rank_on_some_node(
    sizes: list[int], data: st.DataObject
) -> None:
    nodes = nodes_of(sizes)
    num_nodes = len(sizes)
    lost = data.draw(st.sets(st.integers(0, num_nodes - 1)))
    holdings = [[] if node in lost else of_node for node, of_node in enumerate(held_by_all(nodes, 7))]
    chosen = choose(holdings, nodes)
    survives = not any(node in lost and (node + 1) % num_nodes in lost for node in range(num_nodes))
    assert (chosen is not None) == survives
    if chosen is not None:
        assert chosen.step == 7
        for file, source in enumerate(chosen.sources):
            own = nodes.node_of(file)
            assert source == (own if own not in lost else (own + 1) % num_nodes)


@given(SIZES, st.data())
def test_the_newest_copy_that_is_complete_is_taken_however_far_a_newer_one_came(
    sizes: list[int], data: st.DataObject
) -> None:
    nodes = nodes_of(sizes)
    newer = held_by_all(nodes, 8, "b")
    renamed = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    holdings = [
        [*old, *(new if node in renamed else [])]
        for node, (old, new) in enumerate(zip(held_by_all(nodes, 7), newer, strict=True))
    ]
    chosen = choose(holdings, nodes)
    is_complete = choose([new if node in renamed else [] for node, new in enumerate(newer)], nodes) is not None
    assert chosen is not None
    assert (chosen.step, chosen.save_id) == ((8, "b") if is_complete else (7, "a"))


def test_files_of_two_saves_of_one_step_are_not_mixed() -> None:
    nodes = nodes_of([1, 1, 1])
    holdings = [[Held(7, "a", 3, frozenset({0, 2}))], [Held(7, "b", 3, frozenset({1, 0}))], []]
    assert choose(holdings, nodes) is None


def test_a_damaged_file_is_read_where_the_next_node_has_it_and_then_nowhere() -> None:
    nodes = nodes_of([1, 1])
    holdings = held_by_all(nodes, 7)
    first = choose(holdings, nodes)
    assert first is not None
    assert first.sources == (0, 1)
    holdings = without(holdings, "a", [(1, 1)])
    second = choose(holdings, nodes)
    assert second is not None
    assert second.sources == (0, 0)
    assert choose(without(holdings, "a", [(0, 1)]), nodes) is None


def test_copies_of_more_ranks_than_there_are_now_are_read_from_any_holder() -> None:
    assert choose([[Held(7, "a", 3, frozenset({0, 1, 2}))]], nodes_of([1])) is not None


def test_a_node_keeps_its_own_ranks_and_those_of_the_node_before() -> None:
    nodes = nodes_of([2, 1, 1])
    sizes = [10, 20, 300, 4000]
    assert [nodes.kept_on(node, sizes) for node in range(3)] == [4030, 330, 4300]
    assert nodes_of([2]).kept_on(0, [10, 20]) == 30
