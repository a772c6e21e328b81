"""RollCall: decides from what replicas say before a step which of them take part in it. No sockets, no clocks.

All live members of the last quorum are waited for; others, also one of them that was lost and has started again, are
taken in when they happen to be ready, unless none is left that could take them in. Members that lack
the newest state get it from one that has it. A replica that has just started says that it has none; where none has any,
all load the newest checkpoint and are asked again, so that one that starts late never begins a run again.
"""

from collections.abc import Collection, Mapping

from meshwright.spec.run.quorum import Quorum, Readiness


class RollCall:
    """The quorums of a run, one after the other."""

    def __init__(self, num_expected: int, minimum: int, most: int) -> None:
        """Start with `num_expected` replicas, and let `most` take part at once; more wait to replace a lost one."""
        self.num_expected = num_expected
        """Replicas that a run waits for before its first step."""
        self._minimum, self.most = minimum, most
        self.last: Quorum | None = None
        """The newest quorum."""
        self._incarnations: dict[int, str] = {}
        """Of its members."""

    def decide(self, ready: Mapping[int, Readiness], live: Mapping[int, str], *, is_late: bool) -> Quorum | None:
        """Return the next quorum, None to wait; `live` has the incarnations of connected replicas, ready or not.

        `is_late` says that those that are ready have waited as long as they should.
        """
        if not ready or self._live_members(live) - ready.keys():
            return None
        if len(ready) < self._minimum:
            return Quorum(epoch=self._epoch, members=tuple(sorted(ready)), too_few=True) if is_late else None
        if self.last is None and len(ready) < self.num_expected and not is_late:
            return None
        chosen = {replica: ready[replica] for replica in sorted(ready, key=self._precedence)[: self.most]}
        return self._settle(self._quorum(chosen), chosen)

    def let_go(self, replica: int, said: Readiness, live: Collection[int]) -> Quorum:
        """Return the answer to a replica that stops: the others go on without it; the last one writes what is left."""
        others = tuple(other for other in self._awaited() if other in live and other != replica)
        members = others or (replica,)
        return Quorum(epoch=self._epoch, step=said.step or 0, members=members, writer=members[0], stop=said.stop)

    def _precedence(self, replica: int) -> tuple[bool, int]:
        return replica not in self._awaited(), replica

    def _live_members(self, live: Mapping[int, str]) -> set[int]:
        members = live.keys() & set(self._awaited())
        return {replica for replica in members if live[replica] == self._incarnations[replica]} or members

    def _awaited(self) -> tuple[int, ...]:
        return () if self.last is None else self.last.members

    @property
    def _epoch(self) -> int:
        return 0 if self.last is None else self.last.epoch

    def _quorum(self, ready: Mapping[int, Readiness]) -> Quorum:
        members = tuple(sorted(ready))
        newest = max((one.step for one in ready.values() if one.step is not None), default=None)
        epoch = self._epoch + (self._is_new(ready) or any(one.has_failed for one in ready.values()))
        if newest is None:
            return Quorum(epoch=epoch, members=members, restores=True)
        current = [replica for replica in members if ready[replica].step == newest]
        behind = [replica for replica in members if replica not in current]
        # In turn, so that several newcomers have several sources.
        sources = {replica: current[number % len(current)] for number, replica in enumerate(behind)}
        keeps = self.last is not None and self.last.writer in current and not self._is_new_one(self.last.writer, ready)
        writer = self.last.writer if self.last is not None and keeps else current[0]
        return Quorum(epoch=epoch, step=newest, members=members, sources=sources, writer=writer)

    def _is_new(self, ready: Mapping[int, Readiness]) -> bool:
        return self.last is None or {replica: one.incarnation for replica, one in ready.items()} != self._incarnations

    def _is_new_one(self, replica: int, ready: Mapping[int, Readiness]) -> bool:
        return self._incarnations.get(replica) != ready[replica].incarnation

    def _settle(self, quorum: Quorum, ready: Mapping[int, Readiness]) -> Quorum:
        self.last = quorum
        self._incarnations = {replica: one.incarnation for replica, one in ready.items()}
        return quorum
