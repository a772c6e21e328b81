"""The order in which each pipeline rank computes, for every schedule known by name: action by action torch's.

Sources. GPipe: arXiv:1811.06965. 1F1B and its interleaved form: arXiv:2104.04473. Looped breadth-first:
arXiv:2211.05953. Zero bubble (ZB1P, ZB-V): arXiv:2401.10241. DualPipe: arXiv:2412.19437, here folded into a V.

Only the order is said here, not the time: a rank waits where the input of its next action is not there yet.
"""

from collections import Counter
from collections.abc import Callable

from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import Action, Kind


class _Order:
    """The actions of one rank so far; on each stage, forwards and backwards take the microbatches as they come."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._pending: list[Action] = []

    def forward(self, stage: int) -> None:
        self.actions.append(Action("F", stage, self._forwards[stage]))
        self._forwards[stage] += 1

    def backward(self, stage: int) -> None:
        self.actions.append(Action("B", stage, self._backwards[stage]))
        self._backwards[stage] += 1

    def backward_to_inputs(self, stage: int) -> None:
        self.actions.append(Action("I", stage, self._backwards[stage]))
        self._pending.append(Action("W", stage, self._backwards[stage]))
        self._backwards[stage] += 1

    def backward_to_weights(self, stage: int | None = None) -> None:
        """Do the oldest backward to the weights that waits, of all or of one stage; nothing if none does."""
        waiting = [action for action in self._pending if stage in (None, action.stage)]
        if waiting:
            self._pending.remove(waiting[0])
            self.actions.append(waiting[0])


def order_of_rank(rank: int, layout: Layout, num_microbatches: int) -> tuple[Action, ...]:
    """Return the compute actions of pipeline rank `rank` in order; the layout and the number must be valid."""
    if layout.pp == 1:
        # No schedule has anything to overlap then, and this one holds the fewest activations.
        layout = layout.replace(schedule="1F1B")
    return tuple(_ORDERS[layout.schedule](rank, layout, num_microbatches))


def _gpipe(rank: int, layout: Layout, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards: the simplest, and every microbatch's activations are held at once."""
    return [Action(kind, rank, microbatch) for kind in ("F", "B") for microbatch in range(num_microbatches)]


def _looped_bfs(rank: int, layout: Layout, num_microbatches: int) -> list[Action]:
    """All microbatches through one stage, then all through the next, and the same way back.

    FSDP then gathers a stage's parameters once forward and once backward, not for every microbatch.
    """
    stages, microbatches = range(rank, layout.num_stages, layout.pp), range(num_microbatches)
    forwards = [Action("F", stage, microbatch) for stage in stages for microbatch in microbatches]
    backwards = [Action("B", stage, microbatch) for stage in stages[::-1] for microbatch in microbatches[::-1]]
    return forwards + backwards


def _one_forward_one_backward(rank: int, layout: Layout, num_microbatches: int) -> list[Action]:
    """Forwards until the last rank can begin its backwards, then one of each in turn; for one stage or several.

    Microbatches pass a rank's stages in rounds: a round of forwards on its first stage, on its second, and so on.
    Each rank before the last starts with one forward more than the next; with several stages and whole backwards with
    two, since a backward takes about as long as two forwards. With zero bubble (ZB1P), backwards to the weights run
    `rank` microbatches late: the later a rank starts, the more of them it has left for the end, where it would wait.
    """
    splits_backward, num_own = layout.schedule == "InterleavedZeroBubble", layout.stages_per_rank
    forwards_per_hop = 2 if layout.schedule == "Interleaved1F1B" else 1
    round_size = num_microbatches // max(1, num_microbatches // layout.pp)
    total = num_own * num_microbatches
    warmup = min((num_own - 1) * round_size + forwards_per_hop * (layout.pp - 1 - rank), total)

    stages = range(rank, layout.num_stages, layout.pp)
    forwards = _in_rounds("F", stages, num_microbatches, round_size)
    backwards = _in_rounds("I" if splits_backward else "B", stages[::-1], num_microbatches, round_size)
    weights = _in_rounds("W", stages[::-1], num_microbatches, round_size) if splits_backward else []
    order, late = forwards[:warmup], min(rank, total)
    for step, backward in enumerate(backwards):
        order += forwards[warmup + step : warmup + step + 1]
        order.append(backward)
        order += weights[step - late : step - late + 1] if step >= late else []
    return order + weights[total - late :]


def _in_rounds(kind: Kind, stages: range, num_microbatches: int, round_size: int) -> list[Action]:
    """Return an action of each microbatch on each stage: a round of microbatches on the first, on the second, ..."""
    rounds = [range(num_microbatches)[first : first + round_size] for first in range(0, num_microbatches, round_size)]
    return [Action(kind, stage, number) for numbers in rounds for stage in stages for number in numbers]


def _zero_bubble_v(rank: int, layout: Layout, num_microbatches: int) -> list[Action]:
    """ZB-V: a rank's second stage is the mirror image of its first, so the first backward can start early.

    There is no bubble if forward and both halves of backward take the same time. The order is made for as many
    microbatches as fill the pipeline; those beyond the real number are left out of it.
    """
    pp, down, up = layout.pp, rank, layout.num_stages - 1 - rank
    num_filling = max(num_microbatches, 2 * pp - 1)
    order = _Order()

    def forward_and_backward_up() -> None:
        order.forward(up)
        order.backward_to_inputs(up)
        order.backward_to_weights(up)

    for _ in range(2 * (pp - rank) - 1):
        order.forward(down)
    for _ in range(rank):
        order.forward(up)
        order.forward(down)
    for _ in range(pp - rank):
        forward_and_backward_up()
    num_forwards_left = num_filling - (2 * pp - 1 - rank)
    for step in range(num_filling - pp):
        if step < num_forwards_left:
            order.forward(down)
        order.backward_to_inputs(down)
        order.backward_to_weights(down)
        forward_and_backward_up()
    for _ in range(rank):
        order.backward_to_inputs(down)
        order.backward_to_inputs(up)
    for _ in range(pp - rank):
        order.backward_to_inputs(down)
        order.backward_to_weights(down)
    for stage in (up, down):
        for _ in range(rank):
            order.backward_to_weights(stage)
    return [action for action in order.actions if action.microbatch < num_microbatches]


def _dual_pipe_v(rank: int, layout: Layout, num_microbatches: int) -> list[Action]:
    """DualPipe with its two directions folded into one V: forwards of one stage overlap backwards of the other.

    In the middle every forward stands right before a backward of the rank's other stage: the runtime may overlap the
    two, the computation of one with the communication of the other.
    """
    pp, down, up = layout.pp, rank, layout.num_stages - 1 - rank
    order = _Order()

    for _ in range(2 * (pp - rank - 1)):
        order.forward(down)
    for _ in range(rank + 1):
        order.forward(down)
        order.forward(up)
    for _ in range(pp - rank - 1):
        order.backward_to_inputs(up)
        order.backward_to_weights()
        order.forward(up)
    for _ in range(num_microbatches - 2 * pp + rank + 1):
        order.forward(down)
        order.backward(up)
        order.forward(up)
        order.backward(down)
    for _ in range(pp - rank - 1):
        order.backward(up)
        order.forward(up)
        order.backward(down)
    # The last backwards keep those to the weights for the time in which the rank would wait.
    last_backwards = [up, down] * (rank + 1)
    for stage in last_backwards[: rank + 1]:
        order.backward(stage)
    for stage in last_backwards[rank + 1 :]:
        order.backward_to_inputs(stage)
    for _ in range(pp - rank - 1):
        order.backward_to_weights()
        order.backward_to_inputs(down)
    for _ in range(rank + 1):
        order.backward_to_weights()
    return order.actions


_ORDERS: dict[str, Callable[[int, Layout, int], list[Action]]] = {
    "GPipe": _gpipe,
    "1F1B": _one_forward_one_backward,
    "Interleaved1F1B": _one_forward_one_backward,
    "LoopedBFS": _looped_bfs,
    "InterleavedZeroBubble": _one_forward_one_backward,
    "ZBVZeroBubble": _zero_bubble_v,
    "DualPipeV": _dual_pipe_v,
}
