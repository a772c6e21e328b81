"""random_faults(): a schedule of faults that a seed determines."""

import random
from typing import Final

from meshwright.errors import ConfigError
from meshwright.spec.fault import INJECTED, NUMBER_FAULTS, PHASES, Fault

_SLOWER: Final = 3.0
_KINDS: Final = tuple(kind for kind in INJECTED if kind not in NUMBER_FAULTS)
"""Those that a run survives without keys of [guards]."""
_STEP_PHASES: Final = ("data", "forward", "backward", "gradients", "optimizer", "agree")
"""Those that every step has."""


def random_faults(num_faults: int, seed: int, *, num_ranks: int, num_steps: int) -> tuple[Fault, ...]:
    """Return faults that end or slow a rank, in any phase, at most one in each of the steps 2 to `num_steps`.

    Raises ConfigError for more faults than there are such steps.
    """
    if not 1 <= num_faults < num_steps:
        raise ConfigError(
            f"{num_faults} random faults in {num_steps} steps: there is one at most in each step after the first: draw "
            f"1 to {num_steps - 1}, or set train.steps to {num_faults + 1} or more"
        )
    draw = random.Random(seed)
    faults: list[Fault] = []
    for step in sorted(draw.sample(range(2, num_steps + 1), num_faults)):
        kind, rank = draw.choice(_KINDS), draw.randrange(num_ranks)
        restarts = bool(faults) and faults[-1].kind != "slow-rank" and faults[-1].phase != "restore"
        if kind == "slow-rank":
            faults.append(Fault(kind=kind, rank=rank, step=step, argument=_SLOWER))
        elif restarts and draw.random() < 1 / len(PHASES):
            # In the attempt that the fault before it brings about.
            faults.append(Fault(kind=kind, rank=rank, step=(faults[-1].step or 2) - 1, phase="restore"))
        else:
            faults.append(Fault(kind=kind, rank=rank, step=step, phase=draw.choice(_STEP_PHASES)))
    return tuple(faults)
