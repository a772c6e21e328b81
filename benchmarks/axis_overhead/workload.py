"""What is run: one axis of two ranks at a time, on models of a size at which dispatch, or matmuls, take the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from meshwright.data.loader import Microbatch
from meshwright.models.build import build_architecture
from meshwright.models.gpt2 import GPT2
from meshwright.models.initial import initialize
from meshwright.models.llama import Llama
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.trainer.step.build_pipeline import with_stage_boundaries

NUM_RANKS = 2

Step = Callable[[Sequence[Microbatch]], float]
"""One optimizer step on this rank's microbatches: returns the mean loss over the global batch; a collective."""

AXES: dict[str, dict[str, Any]] = {
    "dp_shard": {"dp_shard": 2},
    "dp_replicate": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "cp all-gather": {"cp": 2, "cp_method": "all-gather"},
    "cp ring": {"cp": 2, "cp_method": "ring"},
    "cp ulysses": {"cp": 2, "cp_method": "ulysses"},
    "pp": {"pp": 2, "schedule": "1F1B"},
    "ep": {"dp_shard": 2, "ep": 2},
}
"""The layout of each axis alone; ep is carved out of data-parallel ranks, so it comes with some."""

_TINY = {"vocab_size": 64, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 64}
_SMALL = {**_TINY, "vocab_size": 256, "dim": 64, "num_layers": 4, "head_dim": 16, "ffn_dim": 192}
_MID = {**_SMALL, "vocab_size": 512, "dim": 384, "num_heads": 8, "num_kv_heads": 4, "head_dim": 48, "ffn_dim": 1024}


@dataclass(frozen=True)
class Size:
    """A model, and how many tokens a microbatch has."""

    sizes: dict[str, int]
    seq_len: int
    microbatch_size: int


SIZES = {"tiny": Size(_TINY, 16, 1), "small": Size(_SMALL, 64, 2), "mid": Size(_MID, 256, 2)}
"""tiny: for the test. small: dispatch takes the time. mid: matmuls do."""


@dataclass(frozen=True)
class Workload:
    """What every way of doing it is built from."""

    job: Job
    layout: Layout

    @classmethod
    def of(cls, axis: str, size: Size) -> Workload:
        """Return the workload of an axis: one microbatch a step, or as many as fill a pipeline twice."""
        num_microbatches = 2 * AXES[axis].get("pp", 1) if "pp" in AXES[axis] else 1
        layout = Layout(**AXES[axis], microbatch_size=size.microbatch_size)
        job = Job.from_dict(
            {
                "model": _model(axis, size),
                "data": {
                    "source": f"{__name__}:RandomTokens",
                    "options": {"seq_len": size.seq_len, "vocab_size": size.sizes["vocab_size"]},
                    "validation_fraction": 0.0,
                },
                "train": {
                    "steps": 10_000,
                    "seq_len": size.seq_len,
                    "global_batch_size": layout.dp * size.microbatch_size * num_microbatches,
                },
                # Without decay, parameters of all kinds can share one flat tensor; with a large eps, rounding noise
                # stays noise, and the losses of all ways stay comparable for many steps.
                "optimizer": {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "eps": 1e-3},
                "layout": layout.to_dict(),
                "run": {"device": "cpu"},
            }
        )
        return cls(job, with_stage_boundaries(job, layout, nn.Module()))

    @property
    def architecture(self) -> LlamaArchitecture:
        """Return the sizes of the model."""
        architecture = resolve_architecture(self.job.model)
        assert architecture is not None
        return architecture

    def whole_model(self) -> Llama | GPT2:
        """Return the plain model with the initial weights that every layout of the job starts from."""
        model = build_architecture(self.architecture)
        initialize(model, self.job.train.seed)
        return model

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the initial weights by name."""
        return {name: parameter.detach() for name, parameter in self.whole_model().named_parameters()}


class RandomTokens:
    """Data of a job: sample i is drawn from i."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        self._seq_len, self._vocab_size = seq_len, vocab_size

    def __len__(self) -> int:
        """Return the number of samples."""
        return 512

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (inputs, targets)."""
        tokens = np.random.default_rng(index).integers(self._vocab_size, size=self._seq_len + 1)
        return tokens[:-1], tokens[1:]


def _model(axis: str, size: Size) -> dict[str, Any]:
    if axis != "ep":
        return {"source": "llama-1m", "options": size.sizes}
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_dim": size.sizes["ffn_dim"] // 4}
    return {"source": "moe-4m", "options": {**size.sizes, **experts}}
