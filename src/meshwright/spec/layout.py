"""Layout: how one optimizer step is split over ranks. The planner searches it, the runtime applies it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from meshwright.errors import InfeasibleLayout
from meshwright.spec.noun import Noun

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes whose degrees multiply to the number of ranks, outermost first; ep is carved out of them."""

ActivationCheckpoint = Literal["none", "selective", "full"]
CompileBackend = Literal["inductor", "aot_eager", "eager"]
ReshardAfterForward = Literal["always", "never"]


class Layout(Noun):
    """Degrees and choices that change a step's time and memory, never its numbers."""

    pp: PositiveInt = 1
    """Pipeline-parallel degree (number of pipeline ranks)."""
    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP's outer degree); gradients are averaged across them."""
    dp_shard: PositiveInt = 1
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP2)."""
    cp: PositiveInt = 1
    """Context-parallel degree: ranks that share one sequence."""
    tp: PositiveInt = 1
    """Tensor-parallel degree: ranks that share each matmul."""
    ep: PositiveInt = 1
    """Expert-parallel degree, carved out of dp_shard x cp x tp; multiplies nothing."""
    microbatch_size: PositiveInt = 1
    """Sequences that one data-parallel rank runs forward and backward at once."""
    activation_checkpoint: ActivationCheckpoint = "none"
    """What each block saves for backward: everything (none), matmul outputs (selective), its input (full)."""
    reshard_after_forward: ReshardAfterForward = "always"
    """Whether FSDP2 frees a block's gathered parameters after forward (always) or keeps them (never)."""
    compile: bool = False
    """Whether every block is compiled by torch.compile."""
    compile_backend: CompileBackend = "inductor"
    """The torch.compile backend; used with compile = true only."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks: the product of all degrees but ep."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Return the data-parallel degree: ranks (or groups of ranks) that see different samples."""
        return self.dp_replicate * self.dp_shard


class LayoutRequest(Layout):
    """The [layout] of a job: a Layout in which one degree may be -1, the rest of the ranks."""

    pp: int = Field(1)
    """Pipeline-parallel degree; -1 takes the ranks that the other degrees leave."""
    dp_replicate: int = Field(1)
    """Replicas of the sharded model (HSDP's outer degree); -1 takes the ranks that the others leave."""
    dp_shard: int = Field(1)
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP2); -1 takes the rest."""
    cp: int = Field(1)
    """Context-parallel degree: ranks that share one sequence; -1 takes the rest."""
    tp: int = Field(1)
    """Tensor-parallel degree: ranks that share each matmul; -1 takes the rest."""
    search: bool = False
    """Whether the planner chooses the layout, keeping the keys that are set as constraints."""

    @field_validator(*AXES)
    @classmethod
    def _is_degree(cls, degree: int) -> int:
        if degree == -1 or degree >= 1:
            return degree
        raise ValueError("a degree is 1 or more, or -1 for the rest of the ranks")

    @model_validator(mode="after")
    def _has_one_rest(self) -> LayoutRequest:
        rest = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(rest) > 1:
            raise ValueError(f"{' and '.join(rest)} are both -1: only one degree can be the rest of the ranks")
        return self

    @property
    def rest_axis(self) -> str | None:
        """Return the axis that is -1, or None."""
        return next((axis for axis in AXES if getattr(self, axis) == -1), None)

    def resolve(self, num_ranks: int) -> Layout:
        """Return the concrete Layout for `num_ranks` ranks; raises InfeasibleLayout when they do not fit."""
        degrees = {axis: getattr(self, axis) for axis in AXES}
        fixed = math.prod(degree for degree in degrees.values() if degree != -1)
        product = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree not in (1, -1)) or "1"
        rest = self.rest_axis
        if rest is not None:
            if num_ranks % fixed:
                raise InfeasibleLayout(
                    f"{num_ranks} ranks do not divide by {product} (= {fixed}), so layout.{rest} = -1 has no value: "
                    f"start {fixed * max(1, num_ranks // fixed)} or {fixed * (num_ranks // fixed + 1)} ranks, "
                    "or change a degree in [layout]"
                )
            degrees[rest] = num_ranks // fixed
        elif fixed != num_ranks:
            raise InfeasibleLayout(
                f"the layout needs {product} = {fixed} ranks but there are {num_ranks}: "
                f"start {fixed} ranks, or set one degree in [layout] to -1 to take what is there"
            )
        values = {name: getattr(self, name) for name in Layout.model_fields} | degrees
        return Layout(**values)
