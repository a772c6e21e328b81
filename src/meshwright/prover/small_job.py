"""Small job for proving the layouts of another job, and its changes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.prover.shrink import shrink
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import CheckpointSection, DataSection, ModelSection, PrecisionSection, TrainSection
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.proof import Change, ProofPrecision

_SEQ_LEN = 32
_NUM_DOCUMENTS = 2000
# AdamW divides a gradient by its magnitude plus eps. With the usual 1e-8, rounding noise in a near-zero element moves
# its weight as much as any other, which no bar could distinguish from an error.
_EPS = 1e-2
_LEARNING_RATE = 1e-2
# Below the gradient norm of a new model, so that clipping is tested too.
_MAX_GRAD_NORM = 0.5

_PRECISIONS: Mapping[ProofPrecision, PrecisionSection] = {
    "float32": PrecisionSection(compute="float32", reduce="float32"),
    "float64": PrecisionSection(compute="float64", reduce="float64"),
    "mixed": PrecisionSection(compute="bfloat16", reduce="float32"),
}


@dataclass(frozen=True)
class SmallJob:
    """A job to prove layouts with; its own layout is one process."""

    job: Job
    changes: tuple[Change, ...]

    def with_layout(self, layout: Layout) -> Job:
        """Return the job with `layout`."""
        return self.job.replace(layout=LayoutRequest(**layout.to_dict()))


def small_job(job: Job, layouts: Sequence[Layout], corpus: Path, num_steps: int, precision: ProofPrecision) -> SmallJob:
    """Return a job of `num_steps` that each of `layouts` can run, on the text of `write_corpus`.

    A user's model is not reduced, and runs on its own data.
    """
    common: dict[str, Any] = {
        "layout": LayoutRequest(),
        "precision": _PRECISIONS[precision],
        "checkpoint": CheckpointSection(),
        "optimizer": job.optimizer.replace(
            eps=_EPS,
            learning_rate=_LEARNING_RATE,
            max_grad_norm=min(job.optimizer.max_grad_norm, _MAX_GRAD_NORM),
            warmup_steps=0,
            schedule="constant",
        ),
    }
    architecture = resolve_architecture(job.model)
    if architecture is None:
        train = job.train.replace(steps=num_steps, stop_after=None, validation_interval=0)
        own = job.replace(train=train, **common)
        return SmallJob(own, _changes(job, own))
    smaller = shrink(architecture, layouts)
    small = job.replace(
        model=ModelSection(source=job.model.source, options={**job.model.options, **_options(architecture, smaller)}),
        data=_data(job.data, corpus),
        train=_train(job.train, layouts, num_steps),
        **common,
    )
    return SmallJob(small, (*_architecture_changes(architecture, smaller), *_changes(job, small)))


def _options(architecture: LlamaArchitecture, smaller: LlamaArchitecture) -> dict[str, Any]:
    original = architecture.to_dict()
    return {name: value for name, value in smaller.to_dict().items() if value != original[name]}


def _train(train: TrainSection, layouts: Sequence[Layout], num_steps: int) -> TrainSection:
    """Return the smallest batch that all layouts divide, with enough microbatches for their schedules."""
    # Zigzag cp shards have two chunks per rank, each sharded over tp.
    seq_len = math.lcm(_SEQ_LEN, *(2 * layout.cp * layout.tp for layout in layouts))
    batch = math.lcm(*(layout.dp * layout.microbatch_size * _num_microbatches(layout) for layout in layouts))
    return TrainSection(steps=num_steps, seq_len=seq_len, global_batch_size=batch, seed=train.seed)


def _num_microbatches(layout: Layout) -> int:
    """Return microbatches that fill a pipeline, at least two."""
    return layout.pp * max(2, layout.stages_per_rank)


def write_corpus(file: Path) -> None:
    """Write many short documents, so that every sequence spans several."""
    lines = (json.dumps({"text": f"{n} times {n} is {n * n}"}) + "\n" for n in range(_NUM_DOCUMENTS))
    file.write_text("".join(lines), encoding="utf-8")


def _data(section: DataSection, corpus: Path) -> DataSection:
    return DataSection(
        source=str(corpus),
        cache_dir=str(corpus.parent / "cache"),
        validation_fraction=0.0,
        mask_documents=section.mask_documents,
        shuffle=section.shuffle,
    )


def _architecture_changes(architecture: LlamaArchitecture, smaller: LlamaArchitecture) -> list[Change]:
    return _differences("", architecture.to_dict(), smaller.to_dict())


def _changes(job: Job, small: Job) -> tuple[Change, ...]:
    """Return the changes except the model's sizes, the layout, and machine-specific keys."""
    batch = Change(key="batch", original=str(job.global_batch_size), proven=str(small.global_batch_size))
    changes = [batch]
    for section, keys in (
        ("train", ("seq_len",)),
        ("data", ("source", "tokenizer")),
        ("optimizer", tuple(type(job.optimizer).model_fields)),
        ("precision", ("compute", "reduce")),
        ("model", ("initial_weights",)),
    ):
        before, after = ({key: getattr(getattr(one, section), key) for key in keys} for one in (job, small))
        changes += _differences(f"{section}.", before, after)
    return tuple(change for change in changes if change.original != change.proven)


def _differences(prefix: str, before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    changes = []
    for name, value in after.items():
        if isinstance(value, dict) and isinstance(before[name], dict):
            changes += _differences(f"{prefix}{name}.", before[name], value)
        elif value != before[name]:
            proven = Path(value).name if isinstance(value, str) else value
            changes.append(Change(key=f"{prefix}{name}", original=str(before[name]), proven=str(proven)))
    return changes
