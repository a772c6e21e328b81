"""Degrees: how many ranks share each part of a step; the first keys of a Layout."""

from pydantic import PositiveInt

from meshwright.spec.frozen import Frozen


class Degrees(Frozen):
    """Degrees of parallelism."""

    pp: PositiveInt = 1
    """Pipeline-parallel degree (number of pipeline ranks)."""
    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP's outer degree); gradients are averaged across them."""
    dp_shard: PositiveInt = 1
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP2)."""
    cp: PositiveInt = 1
    """Context-parallel degree: ranks that share one sequence."""
    tp: PositiveInt = 1
    """Tensor-parallel degree: ranks that share each matmul, and the sequence between matmuls (sequence parallel)."""
    ep: PositiveInt = 1
    """Expert-parallel degree, carved out of dp_shard x cp x tp (dp_shard x cp if etp = tp); multiplies nothing."""
    etp: PositiveInt = 1
    """Expert-tensor degree, 1 or tp: ranks that share each expert's matmuls; with 1 the tp ranks split the tokens."""

    @property
    def fsdp(self) -> int:
        """Return the ranks that share one copy of the dense parameters: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def expert_dp_shard(self) -> int:
        """Return the ranks that share one copy of a rank's experts: what ep and etp leave of dp_shard x cp x tp."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def dp(self) -> int:
        """Return the data-parallel degree: ranks (or groups of ranks) that see different samples."""
        return self.dp_replicate * self.dp_shard
