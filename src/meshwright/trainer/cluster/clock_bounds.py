"""Bounds on the offset of two clocks, from messages: none arrives before it was sent."""

import math

from meshwright.spec.machine.node_report import ClockOffset


class ClockBounds:
    """Bounds on how far another clock is ahead of the own one, in seconds; each exchange narrows them."""

    def __init__(self) -> None:
        self._least_s, self._most_s = -math.inf, math.inf

    def add(self, sent_s: float, their_arrival_s: float, their_sending_s: float, arrived_s: float) -> None:
        """Add an exchange: `sent_s` and `arrived_s` are of the own clock, the others of the other clock.

        A message sent at `sent_s` has arrived by `their_arrival_s`; one sent at `their_sending_s` by `arrived_s`.
        """
        self._least_s = max(self._least_s, their_sending_s - arrived_s)
        self._most_s = min(self._most_s, their_arrival_s - sent_s)

    def offset(self, node: int) -> ClockOffset:
        """Return the offset of `node`; bounds that contradict, of a clock that was set meanwhile, are swapped."""
        least_s, most_s = sorted((self._least_s, self._most_s))
        return ClockOffset(node=node, least_s=least_s, most_s=most_s)
