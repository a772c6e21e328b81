"""RankFinding: something that happened to a run and that a person should know, one line of findings.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from meshwright.spec.frozen import Frozen

FindingKind = Literal["corruption", "straggler", "lost replica"]
Action = Literal["recompute", "copy", "restore", "stop", "none"]
"""recompute: forward and backward of the step ran again. copy: the tensors were copied from the majority. restore: the
run returned to its newest checkpoint. stop: the run ended. none: nothing was changed."""


class RankFinding(Frozen):
    """A corruption that was found, or a rank that is slower than the others."""

    kind: FindingKind
    time_s: float
    """In seconds since 1970."""
    step: int
    ranks: tuple[int, ...]
    """The ranks that it is about; several where it is not known which one of them was wrong."""
    hosts: tuple[str, ...]
    """Host of each of these ranks."""
    action: Action
    what: str
    """The finding in a sentence."""
    tensor: str | None = None
    """The first tensor that differs, such as `gradient of norm.weight`."""
    phase: str | None = None
    """The phase of a step in which a straggler is slow."""
    times_slower: float | None = None
    """Own time of a straggler over that of the median rank."""
    num_steps: int | None = None
    """Steps for which a straggler has been slow."""


def read_findings(path: Path) -> list[RankFinding]:
    """Return the findings in a file, oldest first; none without the file. A line that is cut off is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    findings = []
    for line in lines:
        try:
            findings.append(RankFinding.from_json(line))
        except ValidationError:
            continue
    return findings


_MOST_SHOWN = 5


def finding_lines(findings: Sequence[RankFinding]) -> list[str]:
    """Return what a page says of findings: the newest of each straggler, and the newest others of each kind."""
    newest = {finding.ranks: finding for finding in findings if finding.kind == "straggler"}
    corruption = [finding for finding in findings if finding.kind == "corruption"]
    lost = [finding for finding in findings if finding.kind == "lost replica"]
    shown = [*newest.values(), *corruption[-_MOST_SHOWN:], *lost[-_MOST_SHOWN:]]
    lines = [f"step {finding.step}: {finding.what}" for finding in shown]
    if len(lost) > _MOST_SHOWN:
        lines.append(f"{len(lost) - _MOST_SHOWN} earlier losses of replicas are in findings.jsonl")
    if len(corruption) > _MOST_SHOWN:
        lines.append(f"{len(corruption) - _MOST_SHOWN} earlier findings of wrong numbers are in findings.jsonl")
    return lines
