"""Diagnosis of a run from its evidence: the suspected rank, its collective, and advice.

Checks run in this order, since an earlier one explains later ones: the run is over; a process died, failed or is
suspended; the loop makes progress; a rank diverged from its own order of collectives; ranks of a group called different
collectives; nodes lost their connection; ranks wait for one rank; all ranks entered a collective that does not
complete; ranks lost a peer.
"""

from collections.abc import Callable, Sequence

from meshwright.errors import CorruptionError, DataUnavailable, ExitCode
from meshwright.fault_tolerance.connection_loss import lost_connection, nodes_text, ranks_by_host
from meshwright.fault_tolerance.diagnosis_text import (
    Wait,
    activity_text,
    call_location,
    collective_text,
    departure_text,
    expected_text,
    first_mismatch,
    location_text,
    module_of_wait,
    module_source,
    op_text,
    phase_text,
    ranks_text,
    roots,
    signals_text,
    waited_for,
    waits_of,
)
from meshwright.fault_tolerance.evidence import Evidence
from meshwright.spec.run.rank_records import (
    LAST_PHASES,
    Diagnosis,
    FlightRecord,
    Heartbeat,
    ProcessGroupRecord,
    RankState,
    Verdict,
)
from meshwright.units import format_duration

_WHO_KILLED = (
    "Look for who killed it (out of memory: dmesg; the scheduler; a crash: its log), then start the same command with "
    "--resume."
)
_WRONG_NUMBERS = f"{CorruptionError.__name__}: "
_MAY_PASS = f"{DataUnavailable.__name__}: "
"""How the record of a rank begins that ended with such an error."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis; the evidence has the heartbeat of at least one rank."""
    checks = _Checks(evidence)
    all_checks: Sequence[Callable[[], Diagnosis | None]] = (
        checks.has_ended,
        checks.has_died,
        checks.has_failed,
        checks.has_failed_unrecorded,
        checks.is_stopped,
        checks.moves,
        checks.departed,
        checks.disagrees,
        checks.has_lost_connection,
        checks.is_waited_for,
        checks.is_complete,
        checks.has_lost_peer,
    )
    for check in all_checks:
        if (diagnosis := check()) is not None:
            return diagnosis
    return checks.is_unknown()


class _Checks:
    """Checks that return a diagnosis or None."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._beats, self._records = evidence.heartbeats, evidence.records
        self._failed = [record for record in self._records.values() if record.error is not None]
        self._waits = waits_of(evidence.records)
        self._edges = waited_for(self._waits, evidence.heartbeats)

    def has_ended(self) -> Diagnosis | None:
        if not all(beat.phase == "ended" for beat in self._beats.values()):
            return None
        # Ranks that resumed with no step left have begun none.
        step = max(self._evidence.saved_step, *(beat.step for beat in self._beats.values()))
        if signals := self._evidence.signals:
            headline = f"{signals_text(signals)} after all ranks had ended their training, after step {step}"
            return self._say("died", sorted(signals), headline, _WHO_KILLED)
        if self._evidence.exit_code not in (ExitCode.RETRY, ExitCode.INTERRUPTED):
            return self._say("ended", [], f"all ranks exited normally after step {step}", "Nothing.")
        headline = (
            f"all ranks stopped when asked to, after step {step} and before the run's last "
            f"(exit code {self._evidence.exit_code})"
        )
        saved = self._evidence.saved_step
        kept = f"the newest checkpoint is of step {saved}" if saved else "without a checkpoint it starts at step 0"
        advice = f"Start the same command with --resume: {kept}."
        return self._say("ended", [], headline, advice)

    def has_died(self) -> Diagnosis | None:
        gone = [rank for rank, state in self._evidence.processes.items() if state == "gone"]
        dead = [rank for rank in gone if self._beats[rank].phase not in LAST_PHASES and not self._outlived(rank)]
        if not dead:
            return None
        verb = "is" if len(dead) == 1 else "are"
        headline = f"{ranks_text(dead)} {verb} dead, last seen in {phase_text(self._beats[dead[0]])}"
        if signals := {rank: name for rank, name in self._evidence.signals.items() if rank in dead}:
            headline += f": {signals_text(signals)}"
        return self._say("died", dead, headline, _WHO_KILLED, self._first_wait_for(dead))

    def has_failed(self) -> Diagnosis | None:
        return self._first_failure([record for record in self._failed if not record.is_lost_peer])

    def has_failed_unrecorded(self) -> Diagnosis | None:
        """Of the rank that failed first, or all ranks, where they could not write of what: on a full disk."""
        unrecorded = [r for r, beat in self._beats.items() if beat.phase == "failed" and r not in self._records]
        failure = self._evidence.failure
        first = [rank for rank in unrecorded if failure.startswith(f"rank {rank} failed")]
        if not unrecorded or (self._failed and not first):
            return None
        culprits = first or unrecorded
        what = failure if first else f"{ranks_text(culprits)} ended with an error"
        headline = f"{what}, in step {self._beats[culprits[0]].step}, and could not write a flight record"
        advice = (
            "Make room on the disk of the run folder, if it is full; correct what the ranks said last, on the terminal "
            "and in their logs; then start the same command with --resume."
        )
        return self._say("failed", culprits, headline, advice)

    def has_lost_peer(self) -> Diagnosis | None:
        return self._first_failure(self._failed)

    def _first_failure(self, failed: Sequence[FlightRecord]) -> Diagnosis | None:
        if not failed:
            return None
        first = min(failed, key=lambda record: record.time_s)
        headline = f"rank {first.rank} ended first, with {first.error}, {location_text(first.stack)}"
        advice = f"Correct what rank {first.rank} says in its log, then start the same command with --resume."
        if first.error is not None and first.error.startswith(_WRONG_NUMBERS):
            # All ranks end for it alike, and the same hosts would be wrong again.
            what, _, rule = first.error.removeprefix(_WRONG_NUMBERS).rpartition(": ")
            headline = f"the run ended for wrong numbers: {what}"
            return self._say("failed", [], headline, f"{rule[:1].upper()}{rule[1:]}.")
        may_pass = first.error is not None and first.error.startswith(_MAY_PASS)
        if may_pass:
            advice = "Such errors mostly pass: start the same command with --resume."
        if first.is_lost_peer:
            # It may have died where this host sees no process, or with its node.
            advice = (
                "Another rank, or the network to its host, was lost. Read the logs of the ranks that could not write "
                "their record, then start the same command with --resume."
            )
        found = self._say("failed", [first.rank], headline, advice, self._first_wait_for([first.rank]))
        return found.replace(may_pass=may_pass)

    def is_stopped(self) -> Diagnosis | None:
        stopped = [rank for rank, state in self._evidence.processes.items() if state == "stopped"]
        if not stopped:
            return None
        verb = "is" if len(stopped) == 1 else "are"
        headline = f"the process of {ranks_text(stopped)} {verb} suspended{self._not_reached(stopped)}"
        pids = " ".join(str(self._beats[rank].pid) for rank in stopped)
        advice = f"`kill -CONT {pids}` on {self._beats[stopped[0]].host} lets it go on where it was."
        return self._say("stopped", stopped, headline, advice, self._first_wait_for(stopped))

    def moves(self) -> Diagnosis | None:
        alive = {
            rank: beat
            for rank, beat in self._beats.items()
            if beat.phase not in LAST_PHASES and self._evidence.processes[rank] != "gone"
        }
        silent_s = min((self._evidence.silent_s(rank) for rank in alive), default=float("inf"))
        if silent_s > self._evidence.slow_s:
            return None
        rank = min(alive, key=self._evidence.silent_s)
        headline = f"no hang: rank {rank} moved on {format_duration(silent_s)} ago, in {phase_text(alive[rank])}"
        return self._say("moving", [], headline, "Wait; `meshwright report` shows where the time of a step goes.")

    def departed(self) -> Diagnosis | None:
        left = {rank: record.departure for rank, record in self._records.items() if record.departure is not None}
        if not left:
            return None
        rank, departure = min(left.items())
        known = departure.known or departure.found
        place, caller = call_location(self._records[rank], departure.found)
        # After a skipped collective, the stack shows only where the rank continued.
        module = known.module if departure.is_skip else caller or known.module
        headline = f"{ranks_text(sorted(left))} left the order of collectives: {departure_text(departure, place)}"
        advice = (
            "Every rank must ask for the same collectives, every time: look in this module for a branch that only some "
            "ranks take (on the rank's number, on data, on an exception that is swallowed)."
        )
        return self._say("departed", sorted(left), headline, advice, self._first_wait_for([rank])).replace(
            module=module, collective=collective_text(known, self._group(rank, known.group))
        )

    def disagrees(self) -> Diagnosis | None:
        found = first_mismatch(self._records)
        if found is None:
            return None
        calls = "; ".join(
            f"rank {rank} {op_text(one)}{call_location(self._records[rank], one)[0]}"
            for rank, one in found.by_rank.items()
        )
        number = next(iter(found.by_rank.values())).sequence
        headline = f"the ranks of {found.group.axis} have different collectives as their number {number}: {calls}"
        advice = (
            "Every rank must ask for the same collectives in the same order: look for a branch that only some take."
        )
        return self._say("mismatch", sorted(found.by_rank), headline, advice)

    def has_lost_connection(self) -> Diagnosis | None:
        lost = lost_connection(self._evidence, self._waits, self._edges)
        if lost is None:
            return None
        found = self._say("network", [], lost.headline, lost.advice, lost.wait)
        return found.replace(evidence=[*lost.evidence, *found.evidence])

    def is_waited_for(self) -> Diagnosis | None:
        culprits = [rank for rank in roots(self._edges) if not self._is_in_complete_wait(rank)]
        if not culprits:
            return None
        rank = culprits[0]
        verb = "is" if len(culprits) == 1 else "are"
        where = f"in {phase_text(self._beats[rank])}, {location_text(self._evidence.stacks[rank])}"
        headline = f"{ranks_text(culprits)} {verb} {where}{self._not_reached(culprits)}"
        return self._say("busy", culprits, headline, _advice(self._beats[rank]), self._first_wait_for(culprits))

    def is_complete(self) -> Diagnosis | None:
        complete = [wait for wait in self._waits if not wait.absent]
        if complete:
            first = complete[0]
            what = collective_text(first.collective, first.group)
            headline = f"every rank has entered {what}, and it does not end"
            hosts = ranks_by_host({rank: self._beats[rank].host for rank in first.group.ranks if rank in self._beats})
            network = f"the network between {nodes_text(hosts)}" if len(hosts) > 1 else "the network"
            advice = f"Look at {network}, and at the ranks' devices; then start again with --resume."
            return self._say("network", [], headline, advice, first)
        if not any(self._edges.values()):
            return None
        edges = {rank: sorted(peers) for rank, peers in self._edges.items() if peers}
        ring = "; ".join(f"rank {rank} waits for {ranks_text(peers)}" for rank, peers in edges.items())
        advice = "The ranks ask for collectives in different orders: look for a branch that only some of them take."
        wait = self._waits[0] if self._waits else None
        return self._say("mismatch", sorted(edges), f"the ranks wait for each other: {ring}", advice, wait)

    def is_unknown(self) -> Diagnosis:
        silent_s = min(self._evidence.silent_s(rank) for rank in self._beats)
        headline = f"no rank has moved for {format_duration(silent_s)}, and none is known to wait for another"
        if known := [rank for rank, stack in sorted(self._evidence.stacks.items()) if stack]:
            beat, stack = self._beats[known[0]], self._evidence.stacks[known[0]]
            headline += f": rank {known[0]} is in {phase_text(beat)}, {location_text(stack)}"
        return self._say("unknown", [], headline, "Look at the stacks below, and in the ranks' logs.")

    def _say(
        self, verdict: Verdict, culprits: list[int], headline: str, advice: str, wait: Wait | None = None
    ) -> Diagnosis:
        seen = None if wait is None else self._records.get(wait.rank)
        evidence = [] if wait is None else module_source(wait, seen)
        evidence += [expected_text(self._records[rank]) for rank in culprits if rank in self._records]
        for rank in self._evidence.stale:
            evidence.append(
                f"rank {rank}'s flight record is older than its last mark and is left out: it has moved since"
            )
        mute = [rank for rank, beat in self._beats.items() if rank not in self._records and beat.phase != "ended"]
        if mute:
            evidence.append(f"{ranks_text(mute)} could not write what collectives were entered")
        return Diagnosis(
            verdict=verdict,
            culprits=culprits,
            headline=headline,
            collective=None if wait is None else collective_text(wait.collective, wait.group),
            module=None if wait is None else module_of_wait(wait, seen),
            evidence=[sentence for sentence in evidence if sentence],
            advice=advice,
            ranks=[self._state(rank) for rank in sorted(self._beats)],
        )

    def _state(self, rank: int) -> RankState:
        beat = self._beats[rank]
        waits = [wait for wait in self._waits if wait.rank == rank]
        return RankState(
            rank=rank,
            process=self._evidence.processes[rank],
            silent_s=round(self._evidence.silent_s(rank), 3),
            step=beat.step,
            phase=beat.phase,
            doing=activity_text(beat, waits, self._records.get(rank), self._evidence.stacks[rank]),
            waits_for=sorted(self._edges[rank]),
        )

    def _first_wait_for(self, culprits: Sequence[int]) -> Wait | None:
        """Return the lowest rank's wait for one of `culprits`."""
        return next((wait for wait in self._waits if set(wait.absent) & set(culprits)), None)

    def _not_reached(self, culprits: Sequence[int]) -> str:
        wait = self._first_wait_for(culprits)
        if wait is None:
            peers = [rank for rank, waited in self._edges.items() if waited & set(culprits)]
            return f"; {ranks_text(peers)} waits for it in {phase_text(self._beats[peers[0]])}" if peers else ""
        key = (wait.group.name, wait.collective.sequence)
        waiting = [one.rank for one in self._waits if (one.group.name, one.collective.sequence) == key]
        module = module_of_wait(wait, self._records.get(wait.rank))
        where = "" if module is None else f" ({module})"
        verb = "waits" if len(waiting) == 1 else "wait"
        what = collective_text(wait.collective, wait.group)
        return f", and has not reached {what}{where}, in which {ranks_text(waiting)} {verb}"

    def _outlived(self, rank: int) -> bool:
        """Return whether a rank answered after another had failed: it was stuck, and was ended."""
        first_failure_s = min((record.time_s for record in self._failed), default=float("inf"))
        return rank in self._records and self._records[rank].time_s > first_failure_s

    def _is_in_complete_wait(self, rank: int) -> bool:
        return any(wait.rank == rank and not wait.absent for wait in self._waits)

    def _group(self, rank: int, name: str) -> ProcessGroupRecord:
        return next(group for group in self._records[rank].groups if group.name == name)


def _advice(beat: Heartbeat) -> str:
    """Return advice for a rank that is stuck in a phase."""
    match beat.phase:
        case "data":
            what = "the data source waits for something: a file system, a download, a lock, a worker process"
        case "checkpoint":
            what = "the storage is slow or does not answer"
        case "start" | "restore":
            what = "the model, its data or its checkpoint take this rank longer than the others to build or to read"
        case _:
            what = "this code waits for something, or does more on this rank than on the others"
    return f"Look at that line: {what}. If it does not go on, stop the run and start it again with --resume."
