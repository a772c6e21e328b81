"""Problem: a message about a job, with the changes that it suggests as data, so that each can be tried before."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any, Self

from pydantic import ValidationError

from meshwright.errors import MeshwrightError

Fix = dict[str, Any]
"""Dotted keys of a job with the values to set them to; None leaves a key out."""

_MULTIPLES = 32
"""Multiples on each side of a value that are tried before a message suggests none."""
_MOST_JOINED = 3
"""Fixes of each key that are tried together with those of other problems."""
_MOST_TRIED = 40
"""Sets of changes from which further ones are tried before no set is suggested for all problems."""
_MOST_COMBINED = 8
"""Changes of each key that are tried together with a change of another key."""


class Problem(str):
    """What is wrong, and what to set; a string, so that it is joined, compared and printed like any message."""

    what: str
    """The value and the rule that it breaks, without advice."""
    fixes: tuple[Fix, ...]
    """The changes that the message suggests; before `working` has tried them, all that could follow the rule."""

    def __new__(
        cls, what: str, fixes: Iterable[Fix] = (), *, after: str = "", otherwise: str = "", most: int = 2
    ) -> Self:
        """Return a message that suggests `most` of each key's `fixes` and then `after`, or without any `otherwise`."""
        chosen = tuple(fixes)
        advice = f"{_advice(chosen, most)}{after}" if chosen else otherwise
        problem = super().__new__(cls, f"{what}: {advice}" if advice else what)
        problem.what, problem.fixes = what, chosen
        problem._after, problem._otherwise, problem._most = after, otherwise, most
        return problem

    _after: str
    _otherwise: str
    _most: int

    @property
    def subject(self) -> str:
        """Return the first word of the message: the key that it is about."""
        return self.what.split(" ", 1)[0]

    def working(self, is_better: Callable[[Fix], bool]) -> Problem:
        """Return the problem with the first fixes of each key for which `is_better`."""
        kept: list[Fix] = []
        for fix in self.fixes:
            if sum(_group(other) == _group(fix) for other in kept) < self._most and is_better(fix):
                kept.append(fix)
        return Problem(self.what, kept, after=self._after, otherwise=self._otherwise, most=self._most)

    def first_of_each_key(self, most: int) -> list[Fix]:
        """Return the first `most` fixes of each key."""
        return [fix for same in _by_key(self.fixes) for fix in same[:most]]

    def at(self, place: str, note: str = "") -> Problem:
        """Return the problem behind the place where the value is written, and a note behind the whole."""
        problem = Problem(f"{place}: {self.what}")
        return problem._with(f"{place}: {self}{note}", self.fixes)

    def with_note(self, note: str) -> Problem:
        """Return the problem with a note behind the whole."""
        return self._with(f"{self}{note}", self.fixes)

    def _with(self, text: str, fixes: tuple[Fix, ...]) -> Problem:
        problem: Problem = str.__new__(Problem, text)
        problem.what, problem.fixes = self.what, fixes
        problem._after, problem._otherwise, problem._most = "", "", self._most
        return problem


def with_working_fixes(problems: Sequence[Problem], after: Callable[[Fix], Sequence[Problem]]) -> list[Problem]:
    """Return `problems` with those fixes only that leave fewer of them and add none of another key.

    Where a problem has no such fix, two changes that together are one are suggested. `after` returns what is wrong
    after a fix; where it raises MeshwrightError or ValidationError, the fix is left out.
    """
    before = _subjects(problems)

    def left(fix: Fix) -> Sequence[Problem] | None:
        return _left(fix, after)

    def is_better(fix: Fix) -> bool:
        return (found := left(fix)) is not None and _subjects(found) < before

    def combined(problem: Problem) -> Iterator[Fix]:
        for fix in problem.fixes[:_MOST_COMBINED]:
            new = (one for one in left(fix) or () if one.subject not in before)
            yield from (fix | other for one in new for other in one.fixes[:_MOST_COMBINED] if not fix.keys() & other)

    def improved(problem: Problem) -> Problem:
        working = problem.working(is_better)
        if working.fixes or not problem.fixes:
            return working
        both = next(filter(is_better, combined(problem)), None)
        # Another way stays one; what qualifies the values of one key does not.
        after = problem._after if problem._after.startswith(", or ") else ""
        return Problem(problem.what, [both], after=after) if both else working

    return [improved(problem) for problem in problems]


def fix_of_all(problems: Sequence[Problem], after: Callable[[Fix], Sequence[Problem]]) -> Fix | None:
    """Return the fewest of the fixes of `problems`, and of what they lead to, that leave no problem.

    None where none are found. `after` is that of `with_working_fixes`.
    """
    queue: deque[tuple[Fix, Sequence[Problem]]] = deque([({}, problems)])
    for _ in range(_MOST_TRIED):
        if not queue:
            return None
        fix, left = queue.popleft()
        for other in (one for problem in left for one in problem.first_of_each_key(_MOST_JOINED)):
            if fix.keys() & other or (found := _left(fix | other, after)) is None:
                continue
            if not found:
                return fix | other
            queue.append((fix | other, found))
    return None


def _left(fix: Fix, after: Callable[[Fix], Sequence[Problem]]) -> Sequence[Problem] | None:
    """Return what is wrong after a fix; None where a key does not take its value, or that is not known."""
    try:
        return after(fix)
    except (MeshwrightError, ValidationError):
        return None


def _subjects(problems: Iterable[Problem]) -> Counter[str]:
    """Return how many problems are about each key."""
    return Counter(problem.subject for problem in problems)


def nearest_first(value: int, candidates: Iterable[int]) -> Iterator[int]:
    """Yield `candidates` other than `value`: in turn the nearest below and the nearest above that are left."""
    numbers = sorted(set(candidates))
    below, above = [n for n in reversed(numbers) if n < value], [n for n in numbers if n > value]
    return (number for number in chain.from_iterable(zip_longest(below, above)) if number is not None)


@lru_cache(maxsize=1024)
def multiples_near(value: int, divisor: int) -> tuple[int, ...]:
    """Return multiples of `divisor` near `value`, which is none itself: in turn the nearest below and above."""
    below = value // divisor
    numbers = range(max(1, below - _MULTIPLES), below + _MULTIPLES + 1)
    return (*nearest_first(value, (number * divisor for number in numbers)),)


def shown_value(value: object) -> str:
    """Return a value as a job file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def override_of(fix: Fix) -> str:
    """Return a fix as it is written on a command line: "layout.tp=2 layout.dp_shard=4"."""
    values = {key: "none" if value is None else shown_value(value).strip('"') for key, value in fix.items()}
    return " ".join(shlex.quote(f"{key}={value}") for key, value in values.items())


def distinct(problems: Iterable[str]) -> list[str]:
    """Return one message for each thing that is wrong, the last where only the advice differs."""
    return list({problem.what if isinstance(problem, Problem) else problem: problem for problem in problems}.values())


def _advice(fixes: tuple[Fix, ...], most: int) -> str:
    """Return "set layout.tp to 2 or 4, or layout.cp to 1": the first `most` values of each set of keys."""
    ways = [_way(same[:most]) for same in _by_key(fixes)]
    is_set = [not way.startswith("leave ") for way in ways]
    return ", or ".join(
        f"set {way}" if is_set[number] and not any(is_set[:number]) else way for number, way in enumerate(ways)
    )


def _by_key(fixes: Iterable[Fix]) -> list[list[Fix]]:
    """Return fixes that set the same keys together."""
    groups: dict[_Group, list[Fix]] = {}
    for fix in fixes:
        groups.setdefault(_group(fix), []).append(fix)
    return [*groups.values()]


_Group = tuple[str, bool] | tuple[tuple[str, bool], ...]


def _group(fix: Fix) -> _Group:
    """Return the keys of a fix, and whether it leaves each out: fixes that are alike in this are listed together."""
    if len(fix) == 1:
        # Nearly all are, and each try of a fix makes dozens.
        ((key, value),) = fix.items()
        return key, value is None
    return tuple((key, value is None) for key, value in fix.items())


def _way(fixes: list[Fix]) -> str:
    (key, value), *others = fixes[0].items()
    if others:
        is_left_out = {name: one is None for name, one in fixes[0].items()}
        return " and ".join(
            f"leave {name} out" if is_left_out[name] else f"{name} to {shown_value(fixes[0][name])}"
            for name in sorted(is_left_out, key=is_left_out.__getitem__)
        )
    if value is None:
        return f"leave {key} out"
    values = [fix[key] for fix in fixes]
    if all(type(one) is int for one in values):
        values.sort()
    return f"{key} to {' or '.join(map(shown_value, values))}"


_LEAST_ALIKE = 0.5
"""Of difflib's ratio: a name with less in common is no better a guess than any other."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean x?" with the known name that is nearest, or "" if none is near."""
    nearest = nearest_name(name, known)
    return f": did you mean {nearest}?" if nearest else ""


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most alike, case aside, or None if none is near.

    Of names that differ in numbers alone it is the one nearest in size: 7b is rather 8b than 70b.
    """
    spelt, by_spelling = name.casefold(), {one.casefold(): one for one in known}
    pieces = _NUMBER.split(spelt)
    same_words = [one for one in by_spelling if _NUMBER.split(one)[::2] == pieces[::2]]
    if same_words:
        return by_spelling[min(same_words, key=lambda one: _factor_between(_NUMBER.split(one)[1::2], pieces[1::2]))]
    nearest = get_close_matches(spelt, by_spelling, n=1, cutoff=_LEAST_ALIKE)
    return by_spelling[nearest[0]] if nearest else None


def _factor_between(numbers: Sequence[str], others: Sequence[str]) -> float:
    """Return the sum of the logarithms of the factors between numbers, each one more so that 0 has one."""
    return sum(
        abs(math.log1p(float(one)) - math.log1p(float(other))) for one, other in zip(numbers, others, strict=True)
    )
