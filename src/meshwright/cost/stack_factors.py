"""StackFactors: a stack's times as multiples of the generic one's; load_stack: the stacks that are known by name.

    time = formula x the stack's own multiplier [x what a stack that no vendor tuned for the very run takes more]

The stack's three multipliers are fitted on its runs (Stack.compute, communication, overhead); the rest holds for all.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

import numpy as np

from meshwright.cost.achieved_rates import is_blackwell
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.compute.measured_kernels import is_measured
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Bools, Floats
from meshwright.cost.training_setup import Configurations
from meshwright.errors import ConfigError
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.problem import did_you_mean
from meshwright.spec.step.stack import Stack


@dataclass(frozen=True)
class StackFactors:
    """Times as multiples of the generic, tuned stack's, one element a configuration."""

    compute: Floats
    communication: Floats
    overhead: Floats


@dataclass(frozen=True)
class Stacks:
    """What the configurations' stacks are, one element a configuration."""

    fitted: StackFactors
    is_tuned: Bools
    is_newest: Bools
    """Whether the device is of an architecture whose libraries are young."""
    is_omni_path: Bools

    def factors(self, constants: Constants) -> StackFactors:
        """Return the multiples with `constants`."""
        plain = np.where(self.is_newest, constants["plain_compute.blackwell"], constants["plain_compute"])
        return StackFactors(
            self.fitted.compute * np.where(self.is_tuned, 1.0, plain),
            self.fitted.communication * np.where(self.is_tuned, 1.0, constants["plain_communication"]),
            self.fitted.overhead * np.where(self.is_tuned, 1.0, constants["plain_overhead"]),
        )

    def slowed(self, fabric: Fabric, constants: Constants) -> Fabric:
        """Return `fabric` as the stacks reach it."""
        slow = self.factors(constants).communication
        network = np.where(self.is_omni_path, constants["omni_path"], 1.0) * constants["inter_share"]
        return replace(
            fabric.shared(intra=slow / constants["intra_share"], inter=slow / network),
            # What was timed on the very machine needs no share.
            measured_slowdown=fabric.measured_slowdown * slow,
            base_s=constants["collective_s"] * slow,
            intra_step_s=fabric.intra_step_s * slow,
            inter_step_s=fabric.inter_step_s * slow,
            all_to_all_intra_s=constants["exchange_s"] * slow,
        )


def stacks_of(configs: Configurations) -> Stacks:
    """Return what the stacks of the configurations are."""
    each = configs.each
    return Stacks(
        StackFactors(
            each(lambda s: s.stack.compute), each(lambda s: s.stack.communication), each(lambda s: s.stack.overhead)
        ),
        # What was timed on this machine needs no factor.
        is_tuned=configs.has(lambda s: s.stack.is_tuned or is_measured(s)),
        is_newest=configs.has(lambda s: is_blackwell(s.cluster.device)),
        is_omni_path=configs.has(lambda s: is_omni_path(s.cluster)),
    )


def is_omni_path(cluster: Cluster) -> bool:
    """Return whether the nodes are joined by Omni-Path."""
    return cluster.inter_node is not None and "Omni-Path" in cluster.inter_node.name


GENERIC = "generic"
OURS = "meshwright"


@lru_cache
def stacks() -> dict[str, Stack]:
    """Return every known stack by name."""
    folder = files("meshwright.cost") / "stacks"
    texts = {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in folder.iterdir()}
    return {name: Stack.from_dict({**tomllib.loads(text), "name": name}) for name, text in sorted(texts.items())}


def load_stack(name: str) -> Stack:
    """Return the stack called `name`; raises ConfigError with the nearest one, if any is near."""
    known = stacks()
    if name not in known:
        raise ConfigError(f"stack = {name!r} must be one of {', '.join(known)}{did_you_mean(name, known)}")
    return known[name]
