"""ReplicaGuard: compares copies of gradients, parameters and optimizer state on different ranks, before the update.

    every replica_check_interval steps, and before each checkpoint    digests of all copies, one small all-gather
    gradients differ                 forward and backward run again, from parameters that agree: a transient fault
    parameters or states differ      copied from the majority where the state before the step is known to have been
                                     equal: nothing else has used them since; otherwise back to the newest checkpoint
    every recompute_interval steps   the step is computed twice, and its gradients compared with themselves

A checkpoint is saved only of a state whose copies agree, so a run that returns to one ends with the bits of a run
without the fault. All ranks decide by the same table.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.checkpoint.peers import GroupPeers
from meshwright.errors import CorruptionError
from meshwright.fault_tolerance.corruption.replica_copies import ReplicaCopies
from meshwright.fault_tolerance.corruption.replica_vote import (
    CONTENTS,
    Ballot,
    Content,
    DifferingCopies,
    differing,
    differing_copies,
    wrong_ranks,
)
from meshwright.fault_tolerance.corruption.tensor_digest import digest_of
from meshwright.fault_tolerance.run_findings import RunFindings
from meshwright.parallelism.collectives import of_all_ranks
from meshwright.spec.job.guards_section import GuardsSection

Compute: TypeAlias = Callable[[], Tensor]
"""Runs forward and backward of the step again from zero gradients, and returns its loss."""

_MAX_RECOMPUTATIONS = 2
_STATE: tuple[Content, ...] = ("parameters", "optimizer state")
_LOSS, _GRADIENTS = 1, 2
"""Numbers of what a rank compares with itself only."""


class ReplicaGuard:
    """Checks of one rank; every method but the constructor is a collective."""

    def __init__(
        self, section: GuardsSection, copies: ReplicaCopies, device_type: str, save_interval: int, last_step: int
    ) -> None:
        self._section, self._copies, self._device = section, copies, torch.device(device_type)
        self._save_interval, self._last_step = save_interval, last_step
        self._num_rows = 0
        self._equal_after = 0
        """Step after whose update all copies were equal, or computed from what was: 0 is the start."""
        self.findings = RunFindings(None)
        self.before_write: Callable[[], None] = _nothing
        """Called before parameters are overwritten, such as to wait for a snapshot of them."""

    def restored(self, step: int) -> None:
        """Continue from a checkpoint after `step`, which all copies were read from."""
        self._equal_after = step

    def is_due(self, step: int) -> bool:
        """Return whether the gradients of `step` are checked."""
        return _is_multiple(step, self._section.replica_check_interval) or self._is_recomputed(step)

    def settle(self, step: int, loss: Tensor, compute: Compute) -> Tensor | None:
        """Return the loss of `step`, whose gradients now agree; None where the newest checkpoint is to be restored.

        Raises CorruptionError where numbers stay wrong, or a rank was found wrong several times.
        """
        settled: Tensor | None = loss
        if _is_multiple(step, self._section.replica_check_interval):
            settled = self._vote(step, loss, compute)
        if settled is not None and self._is_recomputed(step):
            settled = self._compute_twice(step, settled, compute)
        return settled

    def is_sound(self, step: int, *, is_stopping: bool = False) -> bool:
        """Return whether copies agree after `step`, where a checkpoint follows; otherwise the newest is to be restored.

        What differs is copied from the majority, where the gradients of this step agreed.
        """
        saves = _is_multiple(step, self._save_interval) or step == self._last_step or is_stopping
        if not self._section.replica_check_interval or not saves:
            return True
        found = differing_copies(self._ballots(_STATE))
        if not found or self._repair(step, found, is_exact=self._equal_after == step):
            self._equal_after = step
            return True
        return False

    def _vote(self, step: int, loss: Tensor, compute: Compute) -> Tensor | None:
        """Return the loss of gradients on which copies agree, None where the state cannot be repaired."""
        of_gradients: list[tuple[DifferingCopies, str]] = []
        for _ in range(_MAX_RECOMPUTATIONS + 1):
            ballots = self._ballots(CONTENTS)
            found = differing_copies(ballots)
            if not found:
                self._report_gradients(step, of_gradients, ballots)
                # Unless only this rank's update goes wrong, all copies are equal after it.
                self._equal_after = step
                return loss
            of_state = [one for one in found if one.content in _STATE]
            if of_state and not self._repair(step, of_state, is_exact=self._equal_after == step - 1):
                return None
            if not of_state:
                of_gradients += [(one, self._differing_names(one)[0]) for one in found]
            loss = compute()
        suspects = sorted({rank for one, _ in of_gradients for rank in one.suspects})
        raise CorruptionError(
            f"step {step}: gradients of replicas differ, and still do after {_MAX_RECOMPUTATIONS} recomputations: take "
            f"the host of {self.findings.places(suspects)} out of the run, and continue on others with --resume"
        )

    def _report_gradients(
        self, step: int, found: Sequence[tuple[DifferingCopies, str]], after: Sequence[Ballot]
    ) -> None:
        """Record each set of wrong ranks once, whatever number of their tensors differed."""
        of_ranks = {wrong_ranks(one, after): (one, tensor) for one, tensor in reversed(found)}
        for wrong, (one, tensor) in of_ranks.items():
            what = self._difference(tensor, one, wrong, "differed")
            self.findings.corruption(step, wrong, f"{what}: the step was recomputed", "recompute", tensor)

    def _repair(self, step: int, found: Sequence[DifferingCopies], *, is_exact: bool) -> bool:
        """Copy what differs from the majority; return False, having changed nothing, where that is not exact."""
        copies = is_exact and all(one.majority is not None for one in found)
        names = [self._differing_names(one) for one in found]
        for one, of_one in zip(found, names, strict=True):
            if copies:
                self._copy(one, of_one)
        how = "copied from the majority" if copies else "the run returns to its newest checkpoint"
        of_ranks = {one.suspects: (one, of_one[0]) for one, of_one in reversed([*zip(found, names, strict=True)])}
        for wrong, (one, tensor) in of_ranks.items():
            what = f"{self._difference(tensor, one, wrong, 'differs')}: {how}"
            self.findings.corruption(step, wrong, what, "copy" if copies else "restore", tensor)
        return copies

    def _difference(self, tensor: str, found: DifferingCopies, wrong: Sequence[int], verb: str) -> str:
        """Return in words which copies of a tensor differ from which; between all of them where none is known good."""
        others = [str(rank) for rank in sorted(found.digests) if rank not in wrong]
        if not others:
            return f"{tensor} {verb} between {self.findings.places(wrong, 'and')}"
        copies = f"the copies of ranks {', '.join(others)}" if len(others) > 1 else f"the copy of rank {others[0]}"
        return f"{tensor} of {self.findings.places(wrong)} {verb} from {copies}"

    @torch.no_grad()
    def _copy(self, found: DifferingCopies, names: Sequence[str]) -> None:
        self.before_write()
        own = dist.get_rank()
        if own != found.source and own not in found.suspects:
            return
        for copy in self._copies.of(found.content)[found.copies]:
            if copy.name not in names:
                continue
            data = copy.tensor.contiguous()
            if own == found.source:
                for rank in found.suspects:
                    dist.send(data, rank)
            else:
                dist.recv(data, found.source)
                copy.tensor.copy_(data)

    def _differing_names(self, found: DifferingCopies) -> list[str]:
        """Return the names of the tensors of a set that differ, in their order; a collective of all ranks."""
        copies = self._copies.of(found.content).get(found.copies, [])
        gathered = GroupPeers().gather([(one.name, digest_of([one.tensor])) for one in copies])
        of_holders = [gathered[rank] for rank in sorted(found.digests)]
        names = [same[0][0] for same in zip(*of_holders, strict=True) if len(set(same)) > 1]
        # None where what differed has been made equal since.
        return names or [found.content]

    def _compute_twice(self, step: int, loss: Tensor, compute: Compute) -> Tensor:
        """Return the loss of gradients that two of at most three computations of the step have in common."""
        first = self._own_ballots(loss)
        loss = compute()
        second = self._own_ballots(loss)
        if first == second:
            return loss
        loss = compute()
        third = self._own_ballots(loss)
        if third not in (first, second):
            raise CorruptionError(
                f"step {step}: three computations of it gave three results: operations of this model, or of this "
                "device, are not reproducible, or its memory is damaged: set guards.recompute_interval to 0 if they "
                "are not reproducible without a fault, too"
            )
        odd = second if third == first else first
        # The reduction gives a wrong gradient to all ranks of the sum; a loss is each rank's own.
        accused = differing([one for one in odd if one.copies == _LOSS], [one for one in third if one.copies == _LOSS])
        places = self.findings.places(accused or differing(odd, third))
        what = f"two computations of the step differ on {places}: a third agrees with one of them"
        self.findings.corruption(step, accused, what, "recompute", None)
        return loss

    def _own_ballots(self, loss: Tensor) -> list[Ballot]:
        """Return every rank's digests of its loss and of its gradients."""
        loss_digest, gradients = digest_of([loss]), digest_of(self._copies.own_gradients())
        own = [Ballot(0, _LOSS, "gradients", loss_digest), Ballot(0, _GRADIENTS, "gradients", gradients)]
        return self._gathered(own, len(own))

    def _ballots(self, contents: Sequence[Content]) -> list[Ballot]:
        """Return the digests of all sets of all ranks; a collective."""
        own = []
        for content in contents:
            for number, copies in self._copies.of(content).items():
                own.append(Ballot(0, number, content, digest_of(copy.tensor for copy in copies)))
        if not self._num_rows:
            most = torch.tensor(len(self._copies.ranks_of_set), device=self._device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            self._num_rows = max(1, int(most)) * len(CONTENTS)
        return self._gathered(own, self._num_rows)

    def _gathered(self, own: Sequence[Ballot], num_rows: int) -> list[Ballot]:
        """Return the ballots of all ranks, by rank; the ranks in `own` are not read."""
        rows = [(one.copies, CONTENTS.index(one.content), one.digest) for one in own]
        # Ranks of stages without copies join with empty rows.
        rows += [(0, -1, 0)] * (num_rows - len(rows))
        table = torch.tensor(rows, device=self._device)
        return [
            Ballot(rank, copies, CONTENTS[content], digest)
            for rank, of_rank in enumerate(of_all_ranks(table).tolist())
            for copies, content, digest in of_rank
            if content >= 0
        ]

    def _is_recomputed(self, step: int) -> bool:
        return _is_multiple(step, self._section.recompute_interval)


def _is_multiple(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _nothing() -> None:
    pass
