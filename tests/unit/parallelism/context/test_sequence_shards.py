import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InfeasibleLayout
from meshwright.parallelism.context.context_parallel import in_true_order, sequence_indices
from meshwright.spec.layout.layout import ContextMethod

METHODS: tuple[ContextMethod, ...] = ("all-gather", "ring", "ulysses")


def parts_of(seq_len: int, cp: int, method: ContextMethod) -> list[torch.Tensor]:
    return [sequence_indices(seq_len, rank, cp, method) for rank in range(cp)]


@given(chunk=st.integers(1, 5), cp=st.integers(1, 9), method=st.sampled_from(METHODS))
def test_each_position_is_held_once(chunk: int, cp: int, method: ContextMethod) -> None:
    seq_len = 2 * cp * chunk
    parts = parts_of(seq_len, cp, method)
    assert torch.cat(parts).sort().values.tolist() == list(range(seq_len))
    assert {(len(part), part.dtype) for part in parts} == {(2 * chunk, torch.int64)}
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


@given(chunk=st.integers(1, 5), cp=st.integers(1, 9), method=st.sampled_from(["all-gather", "ring"]))
def test_zigzag_gives_each_rank_the_same_causal_work(chunk: int, cp: int, method: ContextMethod) -> None:
    # The query at position p sees p + 1 keys.
    assert len({int((part + 1).sum()) for part in parts_of(2 * cp * chunk, cp, method)}) == 1


def test_the_parts_of_a_small_sequence() -> None:
    assert [part.tolist() for part in parts_of(8, 2, "ring")] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.tolist() for part in parts_of(8, 2, "ulysses")] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(chunk=st.integers(1, 3), cp=st.integers(1, 6), dim=st.integers(0, 2))
def test_joined_parts_become_the_sequence_again(chunk: int, cp: int, dim: int) -> None:
    shape = [2, 3]
    shape.insert(dim, 2 * cp * chunk)
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    joined = torch.cat([x.index_select(dim, part) for part in parts_of(shape[dim], cp, "ring")], dim)
    assert torch.equal(in_true_order(joined, dim, cp), x)


@given(seq_len=st.integers(1, 40), cp=st.integers(1, 9), method=st.sampled_from(METHODS))
def test_a_sequence_is_refused_exactly_when_it_cannot_be_split(seq_len: int, cp: int, method: ContextMethod) -> None:
    num_chunks = 1 if cp == 1 else cp if method == "ulysses" else 2 * cp
    if seq_len % num_chunks == 0:
        assert len(sequence_indices(seq_len, 0, cp, method)) == seq_len // cp
        return
    with pytest.raises(InfeasibleLayout, match=rf"train.seq_len = {seq_len}: .*set train.seq_len to (.*), or") as error:
        sequence_indices(seq_len, 0, cp, method)
    named = str(error.value).split("set train.seq_len to ")[1].split(",")[0]
    for choice in named.split(" or "):
        sequence_indices(int(choice), 0, cp, method)
