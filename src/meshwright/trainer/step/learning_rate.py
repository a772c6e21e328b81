"""Learning-rate schedule: a pure function of the step, so a checkpoint saves no scheduler state."""

import math

from meshwright.spec.job.sections import OptimizerSection


def learning_rate(step: int, num_steps: int, optimizer: OptimizerSection) -> float:
    """Return the learning rate of `step` (1 is the first) in a run of `num_steps`.

    Linear warmup to the top, then by schedule: cosine or linear down to min_lr_ratio at the last step,
    wsd (warmup, stable, decay) linear over the last decay_fraction, or constant.
    """
    top = optimizer.learning_rate
    if step <= optimizer.warmup_steps:
        return top * step / optimizer.warmup_steps
    first_decay_step = optimizer.warmup_steps
    if optimizer.schedule == "wsd":
        first_decay_step = max(first_decay_step, num_steps - round(optimizer.decay_fraction * num_steps))
    progress = max(0, step - first_decay_step) / max(1, num_steps - first_decay_step)
    match optimizer.schedule:
        case "constant":
            remaining = 1.0
        case "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
        case "linear" | "wsd":
            remaining = 1 - progress
    return top * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * remaining)
