"""ReplicaGroup: one rank's part in a run of independent replicas; what the training loop and the step know of others.

    join        before the first step: get the model from a replica that has it, or load the newest checkpoint
    agree       after each step: who takes part in the next, whether all stop
    sum         in backward: gradients and losses of all members
    commits     before the update: whether this replica has the state and all sums; if not, the step is done again

A replica updates its parameters only with the sum of all members of the quorum. One whose sums failed while another's
did not is a step behind then, and receives the state of that other one, as one that has just come (state_transfer.py).
"""

import signal
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.errors import LostPeer
from meshwright.fault_tolerance.hangs.hang_limit import LONG_PHASES
from meshwright.fault_tolerance.replicas.lanes import Lane, LaneSum
from meshwright.fault_tolerance.replicas.member import Member
from meshwright.fault_tolerance.replicas.state_transfer import SentState, StateTransfer
from meshwright.log import logger
from meshwright.spec.run.quorum import Quorum, ReplicaPlace

_MOST_TRIES: Final = 10
"""Quorums in a row of which none led to a step."""


class ReplicaState(SentState, Protocol):
    """What a replica group needs of the training on its rank."""

    @property
    def trains_locally(self) -> bool:
        """Return whether replicas take several steps between sums, so that all of a state is sent before a step."""

    def restore(self) -> int:
        """Load the newest checkpoint, if there is one, and return its step, 0 without; a collective of the replica."""

    def forget(self) -> bool:
        """Have `restore` draw the weights again where there is no checkpoint; return whether they can be."""

    def take_over(self, metadata: dict[str, Any]) -> None:
        """Take over the rest, after the tensors of the model were received; a collective of the replica."""

    def share(self, index: int, num_members: int) -> None:
        """Take the samples of a member's place from now on."""

    def warm_up(self) -> None:
        """Do once what the first step would be slow to do, without effect on the state that is received."""


class ReplicaGroup:
    """Replicas as one rank sees them."""

    def __init__(self, place: ReplicaPlace, timeout_s: float, last_step: int) -> None:
        """Call it where the replica's own process group is joined; raises LostPeer without a coordinator."""
        self.replica, self._last_step = place.replica, last_step
        self._num_ranks = dist.get_world_size()
        self._member = Member(place, dist.get_rank(), self._num_ranks, timeout_s)
        self._lane = Lane(self._member, dist.get_rank(), timeout_s)
        self._transfer = StateTransfer(self._member, dist.get_rank(), timeout_s)
        self._state: ReplicaState | None = None
        self._has_state = self._is_torn = False
        """Whether the tensors are those of a step, or were left half received."""
        self._returns = False
        """Whether this run has begun before."""
        self._num_tries = 0
        self._has_left = self._is_in_long_phase = False
        self.quorum: Quorum | None = None
        """Who takes part in the step; None before the first."""

    @property
    def is_writer(self) -> bool:
        """Return whether this replica writes metrics and checkpoints."""
        return self.quorum is not None and self.quorum.writer == self.replica

    @property
    def num_members(self) -> int:
        """Return the number of replicas that take part in the step."""
        return len(self._required.members)

    @property
    def summed_bytes(self) -> int:
        """Return the bytes of what this rank has summed over replicas so far."""
        return self._lane.summed_bytes

    def join(self, state: ReplicaState, *, warms_up: bool) -> int:
        """Return the step of the state whose model this replica has now, and whose rest it has, or gets; a collective.

        With `warms_up` it does what is slow beforehand, so that the others do not wait for it.
        """
        self._state, self._returns = state, warms_up
        if warms_up:
            state.warm_up()
        self._enter(0, 0)
        return self._required.step

    def agree(self, step: int, wish: signal.Signals | None = None) -> tuple[int, signal.Signals | None]:
        """Return the steps that the state has, and the strongest stop signal that any rank of any replica got.

        Once all are ready for a next step; before, the state has `step` steps, and has others where it was received or
        loaded meanwhile. Afterwards `quorum` is that of the next step. A collective.
        """
        self._enter(step, wish or 0)
        quorum = self._required
        return quorum.step, signal.Signals(quorum.stop) if quorum.stop else None

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks in this place in all members, in place."""
        self._lane.sum(tensor)

    def start_sum(self, tensor: Tensor) -> LaneSum:
        """Start to sum a tensor over the ranks in this place in all members, in place; all in one order."""
        return self._lane.start_sum(tensor)

    def commits(self) -> bool:
        """Return whether this replica has the state and all sums of this step on all ranks; a collective of it."""
        self._complete_state()
        has_failed = self._is_any(self._lane.has_failed or not self._has_state)
        if has_failed:
            self._lane.abandon()
            if self.is_writer:
                logger.warning("a replica was lost in step %d, which is done again", self._required.step + 1)
        return not has_failed

    def settle(self) -> None:
        """Wait for a state that is on its way after the last step; a collective of the replica.

        Raises LostPeer where it does not arrive.
        """
        self._complete_state()
        if not self._has_state:
            raise LostPeer(f"replica {self.replica}: the replica that sent the state was lost: start with --resume")

    def note_phase(self, step: int, phase: str) -> None:
        """Let others know of a phase that may take longer than a step, which is no reason to give the replica up."""
        is_long = phase in LONG_PHASES
        if is_long != self._is_in_long_phase and not self._has_left:
            self._is_in_long_phase = is_long
            self._member.enter(is_long=is_long)

    def leave(self) -> None:
        """Say that this rank ends in good order."""
        self._has_left = True
        self._member.leave()
        self._member.close()

    @property
    def _required(self) -> Quorum:
        assert self.quorum is not None
        return self.quorum

    def _enter(self, step: int, stop: int) -> None:
        """Ask for quorums until one is connected and all its members have the model."""
        assert self._state is not None
        previous = self.quorum
        while True:
            said = step if self._has_state else None
            self.quorum = quorum = self._member.ready(said, stop=stop, has_failed=self._lane.has_failed)
            if quorum.too_few:
                left = len(quorum.members)
                raise LostPeer(
                    f"{left} of at least replicas.minimum replicas were left, and no other came within run.timeout_s: "
                    "start again with --resume"
                )
            if quorum.stop:
                return
            if quorum.restores:
                step = self._restored()
                continue
            if self._connect(quorum):
                break
            self._try_again()
        self._num_tries = 0
        if previous is None or previous.members != quorum.members:
            self._state.share(quorum.index(self.replica), len(quorum.members))
            # After the last step all agree once more, and end.
            if previous is not None and self.is_writer and quorum.step < self._last_step:
                logger.warning("step %d is that of replicas %s", quorum.step + 1, _listed(quorum.members))

    def _restored(self) -> int:
        """Return the step of the newest checkpoint, having loaded it; a collective of the replica."""
        assert self._state is not None
        self.note_phase(0, "restore")
        can_begin = not self._is_torn or self._state.forget()
        step = self._state.restore()
        if step == 0 and not can_begin:
            raise LostPeer(f"replica {self.replica}: all that had the state were lost before the first checkpoint")
        if self._returns and self.replica == min(self._required.members):
            logger.warning("no replica has the state any more: all continue from step %d", step)
        self._has_state, self._is_torn, self._returns = True, False, True
        return step

    def _connect(self, quorum: Quorum) -> bool:
        """Connect to the members, and begin to pass the state on to those that lack it; return whether it succeeded."""
        assert self._state is not None
        self._lane.form(quorum)
        if self._is_any(self._lane.has_failed):
            self._lane.abandon()
            return False
        self._transfer.begin(quorum, self._state)
        if self._transfer.is_receiving and not self._receive_model(quorum):
            return False
        if self._state.trains_locally:
            self._complete_state()
        return self._has_state or self._transfer.is_receiving

    def _receive_model(self, quorum: Quorum) -> bool:
        """Wait for the model, take over what came with it, and return whether it has come; a collective."""
        assert self._state is not None
        metadata = self._transfer.receive_model()
        self._has_state = False
        if self._is_any(metadata is None):
            self._complete_state()
            return False
        assert metadata is not None
        self._state.take_over(metadata)
        source = quorum.sources[self.replica]
        logger.info("replica %d gets the state after step %d from replica %d", self.replica, quorum.step, source)
        return True

    def _complete_state(self) -> None:
        """Wait until a state is passed on, if one is on its way; a collective of the replica."""
        if not self._transfer.is_under_way:
            return
        is_receiving = self._transfer.is_receiving
        is_whole = self._transfer.finish()
        if is_receiving:
            self._has_state = not self._is_any(not is_whole)
            self._is_torn = not self._has_state
            if self._is_torn:
                self._lane.abandon()

    def _try_again(self) -> None:
        self._num_tries += 1
        if self._num_tries >= _MOST_TRIES:
            raise LostPeer(f"replica {self.replica}: {_MOST_TRIES} times in a row another was lost before a step")

    def _is_any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank of this replica; a collective of it."""
        if self._num_ranks == 1:
            return flag
        number = torch.tensor(int(flag))
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return bool(number)


def _listed(members: tuple[int, ...]) -> str:
    return ", ".join(map(str, members))
