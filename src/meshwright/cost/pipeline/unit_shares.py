"""unit_shares: how a microbatch's time is spread over what a pipeline's stages hold: embedding, blocks, head."""

from __future__ import annotations

from meshwright.cost.constants import fitted_constants
from meshwright.cost.step_times import step_pricer
from meshwright.cost.training_setup import Configurations


def unit_shares(config: Configurations) -> list[float]:
    """Return what each unit that a stage can hold (embedding, blocks, norm with head and loss) takes of a microbatch's
    time through the whole model, of one configuration.

    Without gathers and reductions: a pipeline's stages gather ahead and reduce when they are done.
    """
    seconds = [
        float(one.total[0] - one.dp[0])
        for position, one in step_pricer(config).block_passes(fitted_constants())
        for _ in range(int(position.count[0]))
    ]
    total_s = sum(seconds)
    return [unit_s / total_s for unit_s in seconds]
