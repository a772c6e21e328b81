"""Models as users write them, with tables of their names in a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.checkpoint import save
from meshwright.hf import Drop, HuggingFaceFormat, NameMap, Part, Rename
from meshwright.models.build import build_model
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run

HEADS = (4, 2, 2)
CONFIG = {"model_type": "llama", "vocab_size": 257, "hidden_size": 6, "max_position_embeddings": 32}
ROWS = (
    Rename("embedding.weight", "embed.weight"),
    Rename("norms.{i}.{rest}", "final.{rest}.{i}"),
    Rename("down", "down_proj.weight", is_transposed=True),
    Rename("wide", "fused.weight", part=Part(0, (2, 1), dim=1), is_transposed=True),
    Rename("narrow", "fused.weight", part=Part(1, (2, 1), dim=1), is_transposed=True),
    Rename("qkv", "q.weight", our_part=Part(0, HEADS), our_interleaved_heads=4),
    Rename("qkv", "k.weight", our_part=Part(1, HEADS), our_interleaved_heads=2),
    Rename("qkv", "v.weight", our_part=Part(2, HEADS)),
    Rename("rotated", "rotated.weight", interleaved_heads=2),
    Rename("experts", "experts.{e}.down.weight", is_transposed=True),
    Rename("gate_up", "experts.{e}.w1.weight", our_part=Part(0, (1, 1))),
    Rename("gate_up", "experts.{e}.w3.weight", our_part=Part(1, (1, 1))),
    Rename("first", "experts.{e}.both.weight", part=Part(0, (1, 2))),
    Rename("second", "experts.{e}.both.weight", part=Part(1, (1, 2))),
    Rename("scale", "scale"),
)
DROPS = (Drop("head.weight", "tied", copy_of="embedding.weight"), Drop("{rest}.inv_freq", "constant"))


class EveryRow(nn.Module):
    """A model with a tensor for every kind of row; it computes nothing of use."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, dim)
        self.head = nn.Linear(dim, 257, bias=False)
        self.head.weight = self.embedding.weight
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        shapes = {"down": (7, dim), "wide": (8, dim), "narrow": (4, dim), "qkv": (48, dim), "rotated": (12, dim)}
        stacks = {"experts": (3, 5, dim), "gate_up": (3, 10, dim), "first": (3, 2, dim), "second": (3, 4, dim)}
        for name, shape in {**shapes, **stacks}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("scale", torch.tensor([0.1, 0.2]))
        self.register_buffer("constant", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))

    def hugging_face(self) -> HuggingFaceFormat:
        return HuggingFaceFormat(NameMap(ROWS, DROPS), CONFIG)


class Changed(EveryRow):
    """The same with rows replaced, by their names: a place for what is wrong with a table."""

    def __init__(
        self, replaced: dict[str, dict[str, Any]] | None = None, without: str = "", config: Any = None
    ) -> None:
        super().__init__()
        self.changes, self.without, self.config = replaced or {}, without, config

    def hugging_face(self) -> HuggingFaceFormat:
        rows = [row for row in ROWS if row.ours != self.without]
        rows = [replace(row, **_with_parts(self.changes.get(row.theirs, {}))) for row in rows]
        return HuggingFaceFormat(NameMap(tuple(rows), DROPS), CONFIG if self.config is None else self.config)


class Attribute(nn.Linear):
    """A class with an attribute that is no table."""

    hugging_face = NameMap((Rename("weight", "weight"),))


class Raises(nn.Linear):
    @property
    def hugging_face(self) -> HuggingFaceFormat:
        raise AttributeError("no sizes")


class Counts(nn.Linear):
    """A class with a persistent buffer of whole numbers."""

    hugging_face = HuggingFaceFormat(NameMap((Rename("{rest}", "{rest}"),)), {"model_type": "llama"})

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))


class Layers(nn.Module):
    """Layers under the names that an option has, mapped to themselves."""

    def __init__(self, num_layers: int = 2, prefix: str = "", dim: int = 3) -> None:
        super().__init__()
        self.prefix = prefix
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))

    def hugging_face(self) -> HuggingFaceFormat:
        return HuggingFaceFormat(NameMap((Rename("{rest}", f"{self.prefix}{{rest}}"),)), {"model_type": "mine"})


def write_own_run(folder: Path, name: str, options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Write a run with the checkpoint step-3 of a class of this module, and return its tensors by checkpoint name."""
    job = own_job(name, options)
    torch.manual_seed(3)
    model = build_model(job.model)
    buffers = {f"buffer.{key}": value for key, value in model.named_buffers() if key in model.state_dict()}
    state = {**{key: parameter.detach().clone() for key, parameter in model.named_parameters()}, **buffers}
    run = Run(folder)
    save(run.checkpoint(3), {"model": state, "optimizer": {}}, {"step": 3})
    run.manifest.write_text(Manifest(job=job, seed=0, num_parameters=1).to_json())
    return state


def own_job(name: str, options: dict[str, Any] | None = None) -> Job:
    return Job.from_dict({"model": {"source": f"own_models:{name}", "options": options or {}}})


def _with_parts(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes with lists, as a job's options have them, as parts: (index, shares, dim)."""
    return {
        key: Part(value[0], tuple(value[1]), value[2]) if isinstance(value, list) else value
        for key, value in changes.items()
    }
