"""The task of all ways: a job of ours, the tokens of its steps, and its initial weights as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from meshwright.checkpoint.hf.maps.families import name_map
from meshwright.checkpoint.hf.maps.shapes import stored_shapes
from meshwright.config.write import to_toml
from meshwright.data.dataset import build_dataset
from meshwright.data.loader import Loader
from meshwright.data.order import Share
from meshwright.models.build import build_model
from meshwright.models.initial import Constant
from meshwright.spec.job.job import Job
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from meshwright.spec.model.model_source import resolve_architecture

NUM_RANKS = 2
MAX_STEPS = 1000
_NUM_LINES = 20_000


@dataclass(frozen=True)
class Size:
    """How large the work is."""

    model: str
    seq_len: int
    microbatch_size: int

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one step of all ranks."""
        return self.seq_len * self.microbatch_size * NUM_RANKS


@dataclass(frozen=True)
class Weights:
    """How initial weights are made and stored."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32


SIZES = {"mid": Size("llama-15m", 512, 2), "toy": Size("llama-1m", 32, 1)}


def prepare(folder: Path, job: Job, num_steps: int, weights: Weights = Weights(), *, num_microbatches: int = 1) -> None:
    """Write `job.toml`, `task.json`, `tokens.npy`, `corpus.txt` and `hf/`: what ways read of a `job_of(folder)`.

    Each rank's share of a step is `num_microbatches`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text(
        "".join(f"{n} times {n} is {n * n}; the root of {n * n} is {n}.\n" for n in range(_NUM_LINES))
    )
    (folder / "job.toml").write_text(to_toml(job))
    optimizer = job.optimizer
    task: dict[str, Any] = {"num_steps": num_steps, "seq_len": job.train.seq_len, "device": job.run.device}
    task |= {"microbatch_size": job.layout.microbatch_size, "precision": job.precision.compute}
    task["num_microbatches"] = num_microbatches
    names = ("learning_rate", "betas", "eps", "weight_decay", "max_grad_norm")
    task |= {name: getattr(optimizer, name) for name in names}
    (folder / "task.json").write_text(json.dumps(task))
    np.save(folder / "tokens.npy", tokens_of(job, num_steps))
    if not (folder / "hf").exists():
        write_weights(folder / "hf", job, weights)


def job_of(folder: Path, sections: Mapping[str, Mapping[str, Any]], global_batch_size: int) -> Job:
    """Return the job of `sections` with the data and weights of `folder`, a constant rate, and no checkpoints."""
    common: dict[str, dict[str, Any]] = {
        "model": {"initial_weights": str(folder / "hf")},
        "data": {"source": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": global_batch_size, "steps": MAX_STEPS},
        "optimizer": {"schedule": "constant", "warmup_steps": 0, "learning_rate": 3e-4},
        "checkpoint": {"interval": 0},
    }
    return Job.from_dict({name: {**common.get(name, {}), **sections.get(name, {})} for name in {**common, **sections}})


def cpu_job(folder: Path, size: Size) -> Job:
    """Return the job of two CPU ranks, whose layout each way of ours overrides."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"source": size.model},
        "train": {"seq_len": size.seq_len},
        "layout": {"microbatch_size": size.microbatch_size},
        "run": {"device": "cpu"},
    }
    return job_of(folder, sections, size.microbatch_size * NUM_RANKS)


def tokens_of(job: Job, num_steps: int) -> np.ndarray[Any, Any]:
    """Return the tokens of the first steps, [steps, sequences, seq_len + 1]: rank by rank as ours reads them."""
    dataset = build_dataset(job.data, job.train.seq_len)
    loader = Loader(
        dataset, Share(job.global_batch_size, job.global_batch_size), seed=job.train.seed, shuffle=job.data.shuffle
    )
    steps = []
    for step in range(num_steps):
        (batch,) = loader.microbatches(step)
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1]), "a target is not the next token"
        steps.append(torch.cat((batch.inputs, batch.targets[:, -1:]), dim=1).numpy())
    loader.close()
    return np.stack(steps).astype(np.int64)


def write_weights(folder: Path, job: Job, weights: Weights) -> None:
    """Write the initial weights that our model asks for as a Hugging Face folder."""
    architecture = resolve_architecture(job.model)
    assert architecture is not None, job.model.source
    with torch.device("meta"):
        model: Any = build_model(job.model)
    generator = torch.Generator(weights.device).manual_seed(job.train.seed)
    names, tensors = name_map(architecture), {}
    for name, shape in stored_shapes(architecture).items():
        initial, tensor = model.initial(name), torch.empty(shape, device=weights.device)
        if isinstance(initial, Constant):
            tensor.fill_(initial.value)
        else:
            tensor.normal_(std=initial.std, generator=generator)
        tensors[names.theirs(name)[0]] = tensor.to("cpu", weights.dtype)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(architecture_to_hf(architecture)))
