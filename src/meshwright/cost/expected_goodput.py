"""Expected goodput of a run under failures: one closed formula, for plans, jobs and chaos runs alike.

    goodput  = interval / wall                             of a segment: work between two commits, and what one stops
    wall     = (M + D + restart) x (exp((interval + d) / M) - 1)    M: mean between failures, d: stall of a checkpoint
    restart  = (M + t) x (exp(R / M) - 1)                           R: from the end of an attempt to its first step
    D        = (1 - h) x t + h x hang                               of failures the share h hangs; t, hang: detection
    interval = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d     the best

Exact for failures at a constant rate that befall work, checkpoints and restarts alike: a segment, and a restart, begins
again until it passes without a failure, which takes (M + cost of one failure) x (exp(length / M) - 1) on average. With
t = D = 0 it is equation 20 of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", 2006; the interval is his equation 37, whose first factor is J. W. Young's of 1974, and which neither D nor R
changes. For rare failures it becomes the first-order estimate of the ETTR of arXiv:2410.21680, without its waits in a
queue: 1 - d / interval - (D + R + interval / 2) / M.

Ignored: failures that come together, failures while one is being detected, hangs of a restart, which ends by its own
timeouts, devices that are slow rather than dead, a first start, and that a checkpoint written in the background counts
only once it is written.
"""

import math
from dataclasses import dataclass

_DAY_S = 86_400.0
_MOST = 300.0
"""Of an exponent: beyond it the exponential is as good as infinite."""


@dataclass(frozen=True)
class FailureModel:
    """What failures and checkpoints do to a run, in seconds."""

    mtbf_s: float
    """Mean time between failures of the whole job; math.inf where nothing fails."""
    interval_s: float
    """Work between two checkpoints: steps times the time of one."""
    checkpoint_s: float
    """What training waits for a checkpoint."""
    restart_s: float
    """From the end of a failed attempt to its successor's first step."""
    detection_s: float = 0.0
    """From a failure until the run is ended for it, where a process dies."""
    hang_share: float = 0.0
    """Share of the failures in work that hang, 0 to 1."""
    hang_s: float = 0.0
    """From the last progress until the run is ended for a hang."""


@dataclass(frozen=True)
class ExpectedTime:
    """Expected seconds for each second of work that lasts."""

    productive: float
    """1 by definition."""
    repeated: float
    """Work, and checkpoints, that a failure undid or cut off."""
    checkpoint: float
    restart: float
    """Restarts, with those that failed, and the detection of ranks that died."""
    hang: float
    failures: float
    """Number of failures, those in restarts included."""

    @property
    def total(self) -> float:
        """Return the sum of the seconds."""
        return self.productive + self.repeated + self.checkpoint + self.restart + self.hang

    @property
    def share(self) -> float:
        """Return the goodput, 0 to 1."""
        return min(1.0, self.productive / self.total)


def expected_time(model: FailureModel) -> ExpectedTime:
    """Return what a second of lasting work takes on average, by cause."""
    interval_s, stall = model.interval_s, model.checkpoint_s / model.interval_s
    if math.isinf(model.mtbf_s):
        return ExpectedTime(1.0, 0.0, stall, 0.0, 0.0, 0.0)
    mtbf_s = model.mtbf_s
    # Failures in work for each segment that is committed, and tries of the restart after each.
    in_work = math.expm1(min((interval_s + model.checkpoint_s) / mtbf_s, _MOST)) / interval_s
    tries = math.exp(min(model.restart_s / mtbf_s, _MOST))
    failures = in_work * tries
    hang = in_work * model.hang_share * model.hang_s
    return ExpectedTime(
        productive=1.0,
        repeated=max(0.0, in_work * mtbf_s - 1 - stall),
        checkpoint=stall,
        restart=in_work * ((tries - 1) * (mtbf_s + model.detection_s) + (1 - model.hang_share) * model.detection_s),
        hang=hang,
        failures=failures,
    )


def mean_time_between_failures_s(num_devices: int, failures_per_device_day: float) -> float:
    """Return the seconds between two failures of a job on `num_devices`; infinite where nothing fails."""
    per_day = num_devices * failures_per_device_day
    return _DAY_S / per_day if per_day else math.inf


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two checkpoints that lose least; infinite where nothing fails."""
    if math.isinf(mtbf_s):
        return math.inf
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    interval_s = math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s
    # A checkpoint that costs nothing would be written all the time.
    return max(interval_s, 1.0)
