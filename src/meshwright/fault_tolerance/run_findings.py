"""RunFindings: appends to findings.jsonl, warns, and counts how often a rank was wrong; the same on every rank."""

import socket
import time
from collections import Counter
from collections.abc import Sequence

from meshwright.checkpoint.peers import GroupPeers
from meshwright.errors import CorruptionError
from meshwright.log import logger, warning_if_unwritten
from meshwright.spec.run.finding import Action, RankFinding, read_findings
from meshwright.spec.run.run import Run

_MAX_ACCUSATIONS = 3
"""Findings against the same ranks after which the run ends."""


class RunFindings:
    """Events of one run; methods are collectives, called with equal arguments on all ranks."""

    def __init__(self, run: Run | None) -> None:
        """Without a run, as in tests of a step, nothing is written."""
        self._run = run
        self._hosts: list[str] = []
        self._accused: Counter[tuple[tuple[int, ...], tuple[str, ...]]] = Counter()

    def corruption(self, step: int, ranks: Sequence[int], what: str, action: Action, tensor: str | None) -> None:
        """Record a finding against `ranks`, any of which may be wrong; raises CorruptionError at their third."""
        self.open()
        hosts = tuple(self._hosts[rank] for rank in ranks)
        self._accused[tuple(ranks), hosts] += 1
        count = self._accused[tuple(ranks), hosts]
        is_last = bool(ranks) and count >= _MAX_ACCUSATIONS
        finding = RankFinding(
            kind="corruption",
            time_s=time.time(),
            step=step,
            ranks=tuple(ranks),
            hosts=hosts,
            action="stop" if is_last else action,
            what=what,
            tensor=tensor,
        )
        self.write(finding)
        if is_last:
            places = " or ".join(f"rank {rank} on {host}" for rank, host in zip(ranks, hosts, strict=True))
            raise CorruptionError(
                f"step {step}: {what}: numbers of {places} were wrong {count} times: take "
                f"{' or '.join(sorted(set(hosts)))} out of the run, test its memory and devices, and continue on "
                "others with --resume"
            )

    def write(self, finding: RankFinding, *, is_logged: bool = True) -> None:
        """Append an finding to findings.jsonl, and log it as a warning, on rank 0; no collective."""
        if GroupPeers().rank > 0:
            return
        if is_logged:
            logger.warning("step %d: %s", finding.step, finding.what)
        if self._run is not None:
            with warning_if_unwritten(self._run.findings), self._run.findings.open("a", encoding="utf-8") as file:
                file.write(finding.model_dump_json() + "\n")

    def places(self, ranks: Sequence[int], conjunction: str = "or") -> str:
        """Return ranks with their hosts, in words."""
        self.open()
        return f" {conjunction} ".join(f"rank {rank} ({self._hosts[rank]})" for rank in ranks)

    def host(self, rank: int) -> str:
        """Return the host of a rank."""
        self.open()
        return self._hosts[rank]

    def open(self) -> None:
        """Learn the hosts, and what was found in earlier attempts, before the first finding."""
        if self._hosts:
            return
        peers = GroupPeers()
        self._hosts = peers.gather(socket.gethostname())
        # Rank 0's view: a shared folder may show others an older file.
        earlier = (
            []
            if self._run is None or peers.rank
            else [finding.model_dump_json() for finding in read_findings(self._run.findings)]
        )
        for finding in map(RankFinding.from_json, peers.publish(earlier)):
            if finding.kind == "corruption":
                self._accused[finding.ranks, finding.hosts] += 1
