"""The order of a step's collectives, learned from an early step: it tells where the ones of a later step belong.

Every step of a rank asks for the same collectives in the same order, over all its groups. So the k-th collective of a
later step is the k-th of that order, and the first one that differs is where the rank went another way.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.spec.run.flight_record import Collective, Departure


class CollectiveOrder:
    """The collectives of one step of one rank."""

    def __init__(self, step: Sequence[Collective]) -> None:
        self._known = list(step)

    def placed(self, step: Sequence[Collective]) -> tuple[list[Collective], Departure | None]:
        """Return `step`'s collectives with the modules that the order knows, and where they depart from it.

        From the departure on their modules are left as they are: the order knows no place for them.
        """
        for place, found in enumerate(step):
            known = self._at(place)
            if known is None or _kind(known) != _kind(found):
                is_skip = any(_kind(later) == _kind(found) for later in self._known[place + 1 :])
                departure = Departure(found=found, known=known, is_skip=is_skip)
                return [*self._with_modules(step[:place]), *step[place:]], departure
        return self._with_modules(step), None

    def after(self, step: Sequence[Collective]) -> Collective | None:
        """Return the collective that follows those of `step`, None after the last; its number is not known here."""
        known = self._at(len(step))
        return None if known is None else known.replace(sequence=0, is_done=False)

    def _at(self, place: int) -> Collective | None:
        return self._known[place] if place < len(self._known) else None

    def _with_modules(self, step: Sequence[Collective]) -> list[Collective]:
        return [found.replace(module=known.module) for found, known in zip(step, self._known, strict=False)]


def _kind(one: Collective) -> tuple[str, str, list[list[int]]]:
    return one.group, one.op, one.sizes
