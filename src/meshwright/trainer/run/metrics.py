"""Metrics of one step, and their log line."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from meshwright.units import format_bytes, format_count

_LEAST_DATA_SHARE = 0.01


@dataclass(frozen=True)
class StepMetrics:
    """One row of metrics.jsonl; memory is rank 0's peak, rates are over all ranks."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples_per_s: float
    tokens_per_s: float | None
    step_ms: float
    data_wait_ms: float
    memory_bytes: int
    mfu: float | None
    attempt: int
    experts: dict[str, float] = field(default_factory=dict)
    """Further columns of the row, from ExpertLoad; empty without experts."""

    def row(self) -> dict[str, Any]:
        """Return the row as plain values; None for an unknown MFU and for data without tokens."""
        row = asdict(self)
        experts = row.pop("experts")
        return {**row, **experts}

    def line(self, num_steps: int, peak: str | None, left_s: float) -> str:
        """Return the log line; `peak` names the FLOP/s that MFU refers to. Data waits below 1 % are omitted."""
        speed = f"{format_count(self.samples_per_s)} samples/s"
        if self.tokens_per_s is not None:
            speed = f"{format_count(self.tokens_per_s)} tok/s"
        mfu = () if self.mfu is None else (f"MFU {self.mfu:.1%} of {peak}",)
        skew = (f"skew {self.experts['router_skew']:.2f}",) if self.experts else ()
        waits = self.data_wait_ms > _LEAST_DATA_SHARE * self.step_ms
        return "  ".join(
            (
                f"step {self.step}/{num_steps}",
                f"loss {self.loss:.4f}",
                f"gnorm {self.grad_norm:.3f}",
                f"lr {self.learning_rate:.1e}",
                *skew,
                speed,
                f"{self.step_ms:.0f} ms",
                *((f"data {self.data_wait_ms:.0f} ms",) if waits else ()),
                f"mem {format_bytes(self.memory_bytes)}",
                *mfu,
                f"eta {timedelta(seconds=round(left_s))}",
            )
        )
