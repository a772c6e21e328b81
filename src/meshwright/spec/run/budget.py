"""Budget: the days and the money that training on a number of tokens takes, failures included."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.layout.layout import Layout


class Reliability(Frozen):
    """How often a device ends a run, and what an ending costs."""

    failures_per_device_day: NonNegativeFloat = 419 / (54 * 16_384)
    """Unexpected endings for each device and day: 419 in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783, 3.3.4)."""
    restart_s: NonNegativeFloat = 900.0
    """Seconds from an ending to the first new step: what "more than 90 % effective training time" leaves each of the
    466 endings there, once the steps lost since the last checkpoint are taken off."""
    checkpoint_bytes_per_s_per_node: PositiveFloat = 2e12 / 2_048
    """What storage takes of each node's checkpoint: 2 TB/s sustained for 2,048 nodes (the same paper, 3.3.1)."""
    checkpoint_bytes_per_parameter: PositiveFloat = 12.0
    """Bytes of a checkpoint for each parameter: float32 weights and AdamW's two moments."""


class Budget(Frozen):
    """One way to train on all tokens."""

    cluster: str
    """The cluster's catalogue name."""
    num_devices: PositiveInt
    layout: Layout
    step_s: PositiveFloat
    """One optimizer step, seconds."""
    num_steps: PositiveInt
    """Steps that all tokens take."""
    mtbf_s: PositiveFloat | None
    """Mean time between endings of the whole job, seconds; None where nothing ever fails."""
    checkpoint_s: NonNegativeFloat
    """Seconds that writing a checkpoint keeps training waiting."""
    checkpoint_interval_s: PositiveFloat | None
    """Best time between checkpoints, seconds; None where nothing ever fails."""
    goodput: float = Field(gt=0, le=1)
    """Share of the time in which steps are made that last."""
    days: PositiveFloat
    """Days from start to end."""
    device_hours: PositiveFloat
    """Hours of all devices together."""
    cost: NonNegativeFloat | None = None
    """device_hours times the price; None without a price."""
    is_deadline_satisfied: bool | None = None
    """Whether days are no more than the deadline; None without one."""
    relative_error: NonNegativeFloat
    """Half width of the 80 % interval of step_s, and so of days and cost, as a share."""
