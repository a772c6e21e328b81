"""The engine against the plainest reading of the same rules: one pass over all ranks' records, in an order in which
each is made after all that it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_traces import Script, all_of, execute_scripts

WORLD_SIZE, NUM_STREAMS = 3, 2
GROUPS = ((0, 1, 2), (0, 1), (1, 2))
SECONDS = st.integers(0, 5).map(float)
RANK, STREAM = st.integers(0, WORLD_SIZE - 1), st.integers(0, NUM_STREAMS - 1)
ACTIONS = st.one_of(
    st.tuples(st.just("op"), RANK, STREAM, SECONDS, st.sampled_from([0.0, 1.0])),
    st.tuples(st.just("collective"), st.sampled_from(GROUPS), SECONDS),
    st.tuples(st.just("message"), RANK, RANK, SECONDS),
    st.tuples(st.just("wait"), RANK, STREAM, st.integers(0, 3)),
    st.tuples(st.just("event"), RANK, STREAM, STREAM),
    st.tuples(st.just("sync"), RANK, STREAM),
)


@dataclass
class Oracle:
    """Writes the scripts, and keeps when each record begins and ends next to them."""

    scripts: list[Script] = field(default_factory=lambda: [Script(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)])
    host_s: list[float] = field(default_factory=lambda: [0.0] * WORLD_SIZE)
    free_s: np.ndarray = field(default_factory=lambda: np.zeros((WORLD_SIZE, NUM_STREAMS)))
    channel_s: dict[object, float] = field(default_factory=dict)
    works: list[list[tuple[int, float]]] = field(default_factory=lambda: [[] for _ in range(WORLD_SIZE)])
    ends: list[list[float]] = field(default_factory=lambda: [[] for _ in range(WORLD_SIZE)])

    def op(self, rank: int, stream: int, device_s: float, host_s: float) -> None:
        self.scripts[rank].op(device_s, stream, host_s)
        self.host_s[rank] += host_s
        self._go_on(rank, stream, device_s)

    def collective(self, ranks: tuple[int, ...], wire_s: float) -> None:
        end_s = self._meet(ranks, ranks, wire_s)
        for rank in ranks:
            self.works[rank].append((self.scripts[rank].collective(ranks, wire_s), end_s))
            self.ends[rank].append(end_s)

    def message(self, sender: int, receiver: int, wire_s: float) -> None:
        if sender == receiver:
            return
        end_s = self._meet((sender, receiver), ("message", sender, receiver), wire_s)
        everyone = tuple(range(WORLD_SIZE))
        self.works[sender].append((self.scripts[sender].send(receiver, everyone, wire_s), end_s))
        self.works[receiver].append((self.scripts[receiver].receive(sender, everyone, wire_s), end_s))
        for rank in (sender, receiver):
            self.ends[rank].append(end_s)

    def wait(self, rank: int, stream: int, which: int) -> None:
        if which < len(self.works[rank]):
            work, end_s = self.works[rank][-1 - which]
            self.scripts[rank].wait(work, stream)
            self._go_on(rank, stream, 0.0, end_s)

    def event(self, rank: int, source: int, target: int) -> None:
        event = self.scripts[rank].record_event(source)
        there_s = self._go_on(rank, source, 0.0)
        self.scripts[rank].wait_event(event, target)
        self._go_on(rank, target, 0.0, there_s)

    def sync(self, rank: int, stream: int) -> None:
        self.scripts[rank].sync(stream)
        self.host_s[rank] = self._go_on(rank, stream, 0.0)

    def _meet(self, ranks: tuple[int, ...], channel: object, wire_s: float) -> float:
        came_s = [max(self.host_s[rank], self.free_s[rank, 0]) for rank in ranks]
        for rank, at_s in zip(ranks, came_s, strict=True):
            self.free_s[rank, 0] = at_s
        self.channel_s[channel] = max(*came_s, self.channel_s.get(channel, 0.0)) + wire_s
        return self.channel_s[channel]

    def _go_on(self, rank: int, stream: int, device_s: float, not_before_s: float = 0.0) -> float:
        end_s = max(self.host_s[rank], self.free_s[rank, stream], not_before_s) + device_s
        self.free_s[rank, stream] = end_s
        self.ends[rank].append(float(end_s))
        return float(end_s)


@pytest.mark.slow
@given(st.lists(ACTIONS, max_size=60))
def test_the_engine_plays_any_step_as_the_rules_say(actions: list[tuple[object, ...]]) -> None:
    oracle = Oracle()
    for name, *arguments in actions:
        getattr(oracle, str(name))(*arguments)
    scripts = tuple(oracle.scripts)
    _, execution, found = execute_scripts(all_of(*scripts), scripts, load=0.0)
    assert execution.is_done
    for rank in range(WORLD_SIZE):
        assert found[rank].end_s.tolist() == oracle.ends[rank]
