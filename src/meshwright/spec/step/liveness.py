"""Liveness: what one rank's memory is full of at the peak of a step, and what would take some of it away."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from meshwright.spec.frozen import Frozen


class LiveStorage(Frozen):
    """A storage that is allocated at the peak."""

    storage: NonNegativeInt
    """Position in Trace.storages."""
    num_bytes: NonNegativeInt
    role: str
    """What it is for, as TensorRole names it, lower case."""
    op: str
    """The operation that wrote to it first; "" if it was allocated before the step."""
    scope: str
    """The module in whose code that was; "" outside of modules."""
    phase: str


class Saving(Frozen):
    """One activation that is live at the peak, and what recomputing or offloading it alone would cost."""

    tensor: LiveStorage
    recompute_flops: NonNegativeInt | None = None
    """FLOPs to recompute it from what is kept; None if recomputation would need communication."""
    recompute_s: NonNegativeFloat | None = None
    """The same in seconds of the device."""
    offload_s: NonNegativeFloat
    """To the host's memory and back, if nothing hides it."""

    @property
    def seconds(self) -> float:
        """Return the seconds of the cheaper of the two."""
        return self.offload_s if self.recompute_s is None else min(self.offload_s, self.recompute_s)

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes that a second buys; infinite where a second look at other memory is all."""
        return self.tensor.num_bytes / self.seconds if self.seconds else float("inf")


class SavedTensors(Frozen):
    """Activations that one line of the program made, there at the peak, and what doing without them costs."""

    num_bytes: NonNegativeInt
    """Of all of them together."""
    num_tensors: PositiveInt
    op: str
    """The operation that made them."""
    scope: str
    """The module in whose code it did, with * for numbers where several did; "" outside of modules."""
    recompute_s: NonNegativeFloat | None = None
    """Seconds of the device for making all of them again; None where ranks would have to talk again."""
    offload_s: NonNegativeFloat | None = None
    """To the host's memory and back, if nothing hides it; None where that is the memory they are in."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """Return the seconds of recomputation and of offload, those that are possible and cost time."""
        return tuple(seconds for seconds in (self.recompute_s, self.offload_s) if seconds)


class Liveness(Frozen):
    """The peak of one rank's step by what is alive, before any allocator rounds it up."""

    rank: NonNegativeInt
    peak_bytes: NonNegativeInt
    record: NonNegativeInt
    """Position in the trace of what runs then."""
    op: str
    """Its operation."""
    scope: str
    """The module in whose code it is; "" outside of modules."""
    phase: str
    by_role: dict[str, NonNegativeInt]
    """Bytes by TensorRole, lower case."""
    largest: Annotated[tuple[LiveStorage, ...], Field(strict=False)] = ()
    """What takes most of it, most first."""
    savings: Annotated[tuple[Saving, ...], Field(strict=False)] = ()
    """Of every activation there, the most bytes a second first."""
