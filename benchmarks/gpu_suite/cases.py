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
    sequences: int = 4
    """Of a step."""
    needed_bytes: float = 0
    """Of the device's memory: rows are left out where it has less."""

    @property
    def num_microbatches(self) -> int:
        """Return how many of them a step has."""
        return self.sequences // self.at_once

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of all sequences of a step."""
        return self.seq_len * self.sequences

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
HALF_EIGHT_B = Shape("Llama 3 8B, 16 of 32 blocks", "llama3-8b", 8192, num_layers=16, at_once=2, needed_bytes=135e9)
"""With 6 blocks the head, which stays in bfloat16, has a quarter of the FLOPs; with 16 an eighth, with 32 a 16th."""
SHORT = Shape("Llama 3.2 1B, 2,048 tokens", "llama3.2-1b", 2048, at_once=16, sequences=16)
LONG = Shape("Llama 3.2 1B, 32,768 tokens", "llama3.2-1b", 32_768, sequences=1)
MIXTURE = Shape("Qwen3 30B A3B, 4 of 48 blocks", "qwen3-30b-a3b", 8192, num_layers=4)
"""3.1 billion parameters, 0.9 billion of which a token meets."""
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
CASES[2:2] = [_case(HALF_EIGHT_B, precision, OURS) for precision in ("bfloat16", "float8")]
MORE_CASES = [
    *(_case(shape, precision, OURS) for shape in (SHORT, LONG, MIXTURE) for precision in ("bfloat16", "float8")),
    *(_case(shape, "bfloat16", HF_COMPILED) for shape in (SHORT, LONG)),
    _case(MIXTURE, "bfloat16", HF),
]
"""Rows of --all: other lengths, and a mixture of experts."""
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
    return job_of(folder, sections, shape.sequences)
