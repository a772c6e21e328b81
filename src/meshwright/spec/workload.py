"""Workload: what one optimizer step processes, which changes the numbers and not only the time."""

from pydantic import PositiveInt

from meshwright.spec.noun import Noun
from meshwright.spec.sections import OptimizerSection, PrecisionSection


class Workload(Noun):
    """One optimizer step: how many tokens, in which precision, by which optimizer."""

    seq_len: PositiveInt
    """Tokens in one sequence."""
    global_batch_size: PositiveInt
    """Sequences in one optimizer step over all ranks."""
    precision: PrecisionSection = PrecisionSection()
    """Number formats of the step."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer and its schedule."""

    @property
    def global_batch_tokens(self) -> int:
        """Return the tokens in one optimizer step over all ranks."""
        return self.seq_len * self.global_batch_size
