"""Links: transfers that are under way at the same time, and share the links between their ranks.

    speed = 1 / max(1, the greatest load of any link that the transfer runs over)

A link is one direction, out of a rank or into it, inside its domain (to each of its peers, where every pair of devices
has a link of its own) or over its network card; or one direction of a pod, which all of its ranks share. Its load is
the sum of the shares that the transfers on it take when alone (collective.py, simulator/engine/collective_times.py). So
two equal transfers take twice as long, one inside the domain does not slow one over the network, and a transfer of many
ranks goes at the pace of the busiest link.
Latency passes before the bytes and is not shared. Source: processor sharing, as if every link gave its transfers turns.
Ignored: that a transfer slowed elsewhere leaves room, which max-min fairness would hand on.
"""

from heapq import heappop, heappush

_NEVER = -1


class Links:
    """Transfers that have started, and when the next one ends."""

    def __init__(self, latency_s: list[float], wire_s: list[float], uses: list[list[tuple[int, float]]]) -> None:
        """Take for each transfer its seconds alone, and the (link, share) that it uses."""
        self._latency_s, self._uses = latency_s, uses
        self._left_s = list(wire_s)
        """Seconds that remain at full speed."""
        self._since = [0.0] * len(wire_s)
        self._speed = [0.0] * len(wire_s)
        """0 before its bytes begin to travel."""
        self._version = [0] * len(wire_s)
        """How often its end was predicted: only the latest prediction holds."""
        self._on: dict[int, dict[int, float]] = {link: {} for used in uses for link, _ in used}
        """Transfers on each link, and the share of each."""
        self._events: list[tuple[float, int, int]] = []
        """(time, transfer, version) at which its bytes start to travel (version 0) or it ends, a heap."""

    def start(self, transfer: int, at_s: float) -> None:
        """Start a transfer at `at_s`, which must not be before the last time that next_end() returned."""
        heappush(self._events, (at_s + self._latency_s[transfer], transfer, 0))

    def next_end(self) -> tuple[int, float] | None:
        """Return the next transfer that ends, and when; None once none is under way."""
        events = self._events
        while events:
            at_s, transfer, version = heappop(events)
            if version != self._version[transfer]:
                continue
            if version == 0 and self._left_s[transfer] > 0.0:
                self._enter(transfer, at_s)
                continue
            if version > 0:
                self._leave(transfer, at_s)
            self._version[transfer] = _NEVER
            return transfer, at_s
        return None

    def _enter(self, transfer: int, at_s: float) -> None:
        self._since[transfer] = at_s
        affected: set[int] = set()
        for link, share in self._uses[transfer]:
            on_link = self._on[link]
            on_link[transfer] = share
            if len(on_link) > 1:
                affected.update(on_link)
        for one in sorted(affected) or (transfer,):
            self._predict_end(one, at_s)

    def _leave(self, transfer: int, at_s: float) -> None:
        others: set[int] = set()
        for link, _ in self._uses[transfer]:
            on_link = self._on[link]
            del on_link[transfer]
            if on_link:
                others.update(on_link)
        for other in sorted(others):
            self._predict_end(other, at_s)

    def _predict_end(self, transfer: int, at_s: float) -> None:
        """Queue the end of a transfer as it is if nothing else starts or ends before."""
        load = 1.0
        for link, _ in self._uses[transfer]:
            on_link = self._on[link]
            if len(on_link) > 1:
                load = max(load, sum(on_link.values()))
        speed = 1.0 / load
        if speed == self._speed[transfer]:
            return
        left_s = self._left_s[transfer] - (at_s - self._since[transfer]) * self._speed[transfer]
        self._left_s[transfer], self._since[transfer], self._speed[transfer] = max(left_s, 0.0), at_s, speed
        self._version[transfer] += 1
        heappush(self._events, (at_s + max(left_s, 0.0) * load, transfer, self._version[transfer]))
