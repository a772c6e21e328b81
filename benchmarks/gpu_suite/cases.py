"""CASES: what the suite runs, in the order in which it is needed most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.prepare import job_of
from meshwright.spec.job.job import Job

OURS, HF, HF_COMPILED = "ours", "HF Trainer", "HF Trainer, compiled"
LITGPT = "litgpt, compiled"
MODULES = {OURS: "own_rank", HF: "hf_trainer_rank", HF_COMPILED: "hf_trainer_rank", LITGPT: "litgpt_rank"}
"""The program of a rank, of benchmarks.peers.ranks, by who trains."""


SEQUENCES = 4
"""Of a step."""


@dataclass(frozen=True)
class Shape:
    """A model and the tokens of its step on one device."""

    name: str
    source: str
    seq_len: int
    num_layers: int | None = None
    """None for all of the model's."""
    at_once: int = 1
    """Sequences of a microbatch."""

    @property
    def num_microbatches(self) -> int:
        """Return how many of them a step has."""
        return SEQUENCES // self.at_once

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of all sequences of a step."""
        return self.seq_len * SEQUENCES

    @property
    def model(self) -> dict[str, Any]:
        """Return the keys of [model]."""
        options = {} if self.num_layers is None else {"options": {"num_layers": self.num_layers}}
        return {"source": self.source, **options}

    @property
    def slug(self) -> str:
        """Return the name of its folder."""
        return self.name.replace(" ", "-").replace(",", "")


ONE_B = Shape("Llama 3.2 1B", "llama3.2-1b", 8192, at_once=4)
EIGHT_B = Shape("Llama 3 8B, 6 of 32 blocks", "llama3-8b", 8192, num_layers=6, at_once=2)
"""2.36 billion parameters with embedding and head: all 32 blocks with float32 states are 128 GB."""
TOY = Shape("llama-1m", "llama-1m", 64)


@dataclass(frozen=True)
class Case:
    """One row: who trains what, in which format."""

    shape: Shape
    precision: str
    """"bfloat16" or "float8"; float8 is torchao's tensorwise recipe in the blocks, the rest in bfloat16."""
    who: str

    @property
    def name(self) -> str:
        """Return what names it in the results."""
        return f"{self.shape.name}, {self.precision}, {self.who}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of its rank's program after the folder."""
        float8 = "tensorwise" if self.precision == "float8" else "none"
        # float8 without compilation is slower than bfloat16, so both compile for it.
        compiled = {HF: self.precision == "float8", HF_COMPILED: True, LITGPT: True}.get(self.who, False)
        if self.who == OURS:
            return (f"precision.float8={float8}", "layout.compile_loss=true")
        return (f"float8={float8}", *["compiled"] * compiled)


def _case(shape: Shape, precision: str, who: str) -> Case:
    return Case(shape, precision, who)


CASES = [
    _case(shape, precision, who)
    for precision, who in (
        ("bfloat16", OURS),
        ("float8", OURS),
        ("bfloat16", LITGPT),
        ("bfloat16", HF_COMPILED),
        ("float8", HF_COMPILED),
        ("bfloat16", HF),
    )
    for shape in (ONE_B, EIGHT_B)
]
TOY_CASES = [_case(TOY, "bfloat16", OURS), _case(TOY, "bfloat16", HF), _case(TOY, "float8", OURS)]


def suite_job(shape: Shape, folder: Path, device: str) -> Job:
    """Return the job of one shape, in bfloat16, whose blocks are compiled where the device is a GPU."""
    sections: dict[str, dict[str, Any]] = {
        "model": shape.model,
        "train": {"seq_len": shape.seq_len},
        "optimizer": {"learning_rate": 1e-4},
        "precision": {"compute": "bfloat16"},
        "layout": {"microbatch_size": shape.at_once, "dp_shard": 1, "compile": device == "cuda"},
        "run": {"device": device},
    }
    return job_of(folder, sections, SEQUENCES)
