"""RunRow: one row of a file of measured runs, its numbers parsed and its spellings unified; empty is None."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import UnsupportedError
from meshwright.spec.step.workload import Precision

_SPELLINGS: dict[Precision, str] = {
    "float32": "fp32 float32 tf32",
    "float16": "fp16 float16",
    "bfloat16": "bf16 amp_bf16 bfloat16",
    "float8-tensorwise": "fp8 amp_fp8 fp8-cs fp8-tensorwise",
    "float8-rowwise": "fp8-rowwise",
    "mxfp8": "fp8-mx mxfp8 mxfp8-rceil",
    "nvfp4": "nvfp4 fp4",
}
PRECISIONS = {spelling: precision for precision, spellings in _SPELLINGS.items() for spelling in spellings.split()}
"""Spellings of published tables."""
_MAX_COUNT = 1_000_000_000
ASSUMED_COLUMNS = frozenset({"vocab", "mtp_modules", "vpp", "micro_batch", "activation_ckpt", "fsdp_group"})
"""What the column assume may give where a row's own cell is empty."""


@dataclass(frozen=True)
class RunRow:
    """One measured run as its file states it."""

    cells: Mapping[str, str]
    """The row's non-empty cells by column."""
    architecture: Mapping[str, Any] = field(default_factory=dict)
    """The cell arch_json, parsed."""
    assume: Mapping[str, str] = field(default_factory=dict)
    """The cell assume, parsed: what to take where the source is silent, by column."""

    def text(self, column: str, default: str = "") -> str:
        """Return the cell, `default` if it is empty."""
        return self.cells.get(column, default)

    def number(self, column: str) -> float | None:
        """Return the cell as a finite number, None if it is empty; raises UnsupportedError if it is something else."""
        text = self.cells.get(column)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UnsupportedError(f"{column} = {text!r} is no number")
        return value

    def count(self, column: str) -> int | None:
        """Return the cell as a positive whole number, None if it is empty; raises UnsupportedError otherwise."""
        value = self.number(column)
        if value is None:
            return None
        if value < 1 or value != int(value):
            raise UnsupportedError(f"{column} = {self.cells[column]!r} is no positive whole number")
        if value > _MAX_COUNT:
            raise UnsupportedError(f"{column} = {self.cells[column]!r} is more than any run has ({_MAX_COUNT:,})")
        return int(value)

    def count_or(self, column: str, default: int, assumed: list[str]) -> int:
        """Return the cell as a positive whole number; where it is empty what the cell assume says, else `default`.

        What is not stated is noted in `assumed`.
        """
        stated = self.count(column)
        if stated is not None:
            return stated
        count = RunRow(self.assume).count(column) or default
        assumed.append(f"{column}={count}")
        return count

    def text_or(self, column: str, default: str, assumed: list[str]) -> str:
        """Return the cell as it is; where it is empty as count_or()."""
        stated = self.text(column)
        if not stated:
            stated = self.assume.get(column, default)
            assumed.append(f"{column}={stated}")
        return stated

    def required(self, column: str) -> int:
        """Return the cell as a positive whole number; raises UnsupportedError if it is empty."""
        value = self.count(column)
        if value is None:
            raise UnsupportedError(f"{column} is empty: it is required")
        return value

    def size(self, key: str, default: int = 0) -> int:
        """Return a size of the cell arch_json, `default` if it has none; raises UnsupportedError if it is no size."""
        value = self.architecture.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 <= value <= _MAX_COUNT or value != int(value):
            raise UnsupportedError(f"arch_json has {key} = {value!r}, which is no whole number from 0 on")
        return int(value)

    @property
    def id(self) -> str:
        """Return the row's name."""
        return self.text("id")

    @property
    def stack(self) -> str:
        """Return the software stack's name; empty if unknown."""
        return self.text("stack")

    @property
    def source(self) -> str:
        """Return the family of sources that the run was published in."""
        return self.text("source_family") or self.text("source") or "unnamed"

    @property
    def precision(self) -> Precision:
        """Return the format of the matmuls; raises UnsupportedError for one that is not known."""
        return self.format_of("precision")

    def format_of(self, column: str) -> Precision:
        """Return the format in a cell, bfloat16 if it is empty; raises UnsupportedError for one that is not known."""
        name = self.text(column, "bf16").lower()
        if name not in PRECISIONS:
            raise UnsupportedError(f"{column} = {name!r}: must be one of {', '.join(sorted(PRECISIONS))}")
        return PRECISIONS[name]

    @property
    def measured_s(self) -> float | None:
        """Return the measured seconds of a step, stated or from tokens per second; None if the row has neither."""
        stated = self.number("step_time_s") or self.number("step_time_calc_s")
        if stated is not None:
            return stated
        rate, devices = self.number("tokens_per_s_per_gpu"), self.number("n_gpus")
        batch, seq_len = self.number("global_batch"), self.number("seq_len")
        if rate and devices and batch and seq_len:
            return batch * seq_len / (rate * devices)
        return None

    @property
    def measured_bytes(self) -> float | None:
        """Return the measured peak of device memory, None if the row has none (GB of the tables are GiB)."""
        gib = self.number("mem_gb_per_gpu")
        return None if gib is None else gib * 2**30


def run_row(cells: Mapping[str, str | None]) -> RunRow:
    """Return the row that `cells` hold; raises UnsupportedError where arch_json or assume cannot be parsed."""
    filled = {key: value.strip() for key, value in cells.items() if key and value and value.strip()}
    text = filled.get("arch_json", "{}")
    try:
        architecture = json.loads(text)
    except ValueError:
        architecture = None
    if not isinstance(architecture, dict):
        raise UnsupportedError(f"arch_json = {text!r} is no JSON object")
    return RunRow(filled, architecture, _assume(filled.get("assume", "")))


def _assume(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    found = {column.strip(): value.strip() for column, _, value in pairs}
    if not all(found.keys() <= ASSUMED_COLUMNS and value for value in found.values()):
        raise UnsupportedError(
            f"assume = {text!r}: write COLUMN=VALUE; ... with columns of {', '.join(sorted(ASSUMED_COLUMNS))}"
        )
    return found
