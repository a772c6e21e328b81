"""Which copies of the same tensors differ, and which ranks are wrong; plain data, decided alike on every rank."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Content = Literal["gradients", "parameters", "optimizer state"]
CONTENTS: tuple[Content, ...] = ("gradients", "parameters", "optimizer state")


class Ballot(NamedTuple):
    """The digest that one rank reports of its copy of a set of tensors."""

    rank: int
    copies: int
    """Number of the set: ranks with the same number hold copies of the same tensors."""
    content: Content
    digest: int


@dataclass(frozen=True)
class DifferingCopies:
    """A set of tensors whose copies differ."""

    copies: int
    content: Content
    digests: dict[int, int]
    """Digest by rank, of all ranks that hold a copy."""

    @property
    def majority(self) -> int | None:
        """Return the digest of more than half of the copies; None without one, as with two copies."""
        digest, count = Counter(self.digests.values()).most_common(1)[0]
        return digest if 2 * count > len(self.digests) else None

    @property
    def suspects(self) -> tuple[int, ...]:
        """Return the ranks outside the majority; all ranks where there is no majority."""
        return self.other_than(self.majority)

    @property
    def source(self) -> int:
        """Return the lowest rank of the majority, which must exist."""
        majority = self.majority
        assert majority is not None
        return min(rank for rank, digest in self.digests.items() if digest == majority)

    def other_than(self, digest: int | None) -> tuple[int, ...]:
        """Return the ranks, ascending, with another digest than this; all for None."""
        return tuple(sorted(rank for rank, own in self.digests.items() if own != digest))


def differing_copies(ballots: Iterable[Ballot]) -> list[DifferingCopies]:
    """Return the sets whose copies differ, in an order that is the same on every rank."""
    by_set: dict[tuple[int, Content], dict[int, int]] = defaultdict(dict)
    for ballot in ballots:
        by_set[ballot.copies, ballot.content][ballot.rank] = ballot.digest
    return [
        DifferingCopies(copies, content, digests)
        for (copies, content), digests in sorted(by_set.items(), key=lambda item: item[0])
        if len(set(digests.values())) > 1
    ]


def wrong_ranks(found: DifferingCopies, after: Sequence[Ballot]) -> tuple[int, ...]:
    """Return who had computed wrong gradients, by those of the recomputed step, on which all copies agree.

    All ranks that had differed from it, unless all had: then the step is not reproducible, and the majority counts.
    """
    agreed = {ballot.digest for ballot in after if (ballot.copies, ballot.content) == (found.copies, found.content)}
    if len(agreed) != 1:
        return found.suspects
    wrong = found.other_than(agreed.pop())
    return wrong if len(wrong) < len(found.digests) else found.suspects


def differing(one: Sequence[Ballot], other: Sequence[Ballot]) -> tuple[int, ...]:
    """Return the ranks, ascending, any of whose digests differ between two computations of one step."""
    return tuple(sorted({ballot.rank for ballot in set(one) ^ set(other)}))
