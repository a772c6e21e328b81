"""Small job for proving the layouts of another job on a laptop, and its changes.

Whether a layout works depends on which of its degrees divide which sizes, such as key/value heads by tp and experts by
ep. So each size of the model is replaced by the smallest that the same degrees divide.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.prover.proof_data import proof_section, reads_own_data
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import (
    CheckpointSection,
    ModelSection,
    PrecisionSection,
    TrainSection,
)
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import LatentAttention, MoEArchitecture
from meshwright.spec.model.weight_shapes import weight_shapes
from meshwright.spec.run.proof import Change, ProofPrecision
from meshwright.spec.step.adapter import ALL_LINEAR_LAYERS, PACKED_BLOCK, Adapter

_SEQ_LEN = 32
# Of some conversations or pairs: the job's own at most, and those that are written.
_MAX_SEQ_LEN, _CONVERSATION_SEQ_LEN = 1024, 128
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
    """Return a job of `num_steps` that each of `layouts` can run.

    Its task is the job's: fine-tuning reads the job's own data, pretraining `corpus`, the text of `write_corpus`. A
    user's model is not reduced, and runs on its own data.
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
            # The gradients are compared, and so must outlive backward; the updates are the same bits.
            in_backward=False,
        ),
    }
    architecture = resolve_architecture(job.model)
    if architecture is None:
        # Exact sums are compared by their bits (tests/ranks/parallelism/test_exact_sums.py), and are not for float64.
        train = job.train.replace(steps=num_steps, stop_after=None, validation_interval=0, exact_elastic=False)
        own = job.replace(train=train, **common)
        return SmallJob(own, _changes(job, own))
    smaller = shrink(architecture, layouts, PACKED_BLOCK if job.adapter.packs_base else 1)
    small = job.replace(
        model=ModelSection(source=job.model.source, options={**job.model.options, **_options(architecture, smaller)}),
        data=proof_section(job, corpus),
        train=_train(job, layouts, num_steps),
        adapter=_adapter(job.adapter, smaller),
        **common,
    )
    sizes = _differences("", architecture.to_dict(), smaller.to_dict())
    return SmallJob(small, (*sizes, *_changes(job, small)))


def _options(architecture: LlamaArchitecture, smaller: LlamaArchitecture) -> dict[str, Any]:
    original = architecture.to_dict()
    return {name: value for name, value in smaller.to_dict().items() if value != original[name]}


def _adapter(adapter: Adapter, smaller: LlamaArchitecture) -> Adapter:
    """Return the adapter of the small model, drawn at random; of all layers where it has none that `adapter` names."""
    if not adapter.freezes_base:
        return adapter
    names = [name.removesuffix(".weight") for name in weight_shapes(smaller)]
    targets = [target for target in adapter.targets if target not in adapter.idle_targets(names)]
    return adapter.replace(initial=None, targets=tuple(targets) or ALL_LINEAR_LAYERS)


def _train(job: Job, layouts: Sequence[Layout], num_steps: int) -> TrainSection:
    """Return the smallest batch that all layouts divide, with enough microbatches for their schedules."""
    # Zigzag cp shards have two chunks per rank, each sharded over tp.
    seq_len = _multiple_from(_tokens(job), math.lcm(*(2 * layout.cp * layout.tp for layout in layouts)))
    batch = math.lcm(*(layout.dp * layout.microbatch_size * _num_microbatches(layout) for layout in layouts))
    train = job.train
    return TrainSection(task=train.task, steps=num_steps, seq_len=seq_len, global_batch_size=batch, seed=train.seed)


def _tokens(job: Job) -> int:
    """Return tokens of a sequence that hold several documents."""
    if reads_own_data(job):
        return min(job.train.seq_len, _MAX_SEQ_LEN)
    return _SEQ_LEN if job.train.task == "pretrain" else _CONVERSATION_SEQ_LEN


def _num_microbatches(layout: Layout) -> int:
    """Return microbatches that fill a pipeline, at least two."""
    return layout.pp * max(2, layout.stages_per_rank)


def _changes(job: Job, small: Job) -> tuple[Change, ...]:
    """Return the changes except the model's sizes, the layout, and machine-specific keys."""
    batch = Change(key="batch", original=str(job.global_batch_size), proven=str(small.global_batch_size))
    changes = [batch]
    for section, keys in (
        ("train", ("seq_len",)),
        ("data", ("source", "tokenizer", "too_long", "max_bytes")),
        ("optimizer", tuple(type(job.optimizer).model_fields)),
        ("precision", ("compute", "reduce", "float8")),
        ("model", ("initial_weights",)),
        ("adapter", ("initial", "targets")),
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


_DIM = 32
_HEAD_DIM = 8
_LATENT_DIM = 16
_FFN_DIM = 48
_EXPERT_FFN_DIM = 16
# Less than the shard of a sequence, so that it ends within shards and between them.
_WINDOW = 6
# The byte tokenizer's 257 ids rounded up to a multiple of 32.
_VOCAB_SIZE = 288
_MIN_EXPERTS = 4


def shrink(architecture: LlamaArchitecture, layouts: Sequence[Layout], block: int = 1) -> LlamaArchitecture:
    """Return the architecture with the smallest sizes that `layouts` and its features allow.

    What a rank has of the inputs of a linear layer are whole blocks of so many.
    """
    tp = math.lcm(*(layout.tp for layout in layouts))
    sizes: dict[str, Any] = {
        "vocab_size": _multiple_from(_VOCAB_SIZE, tp),
        "dim": _multiple_from(_DIM, block),
        "num_layers": _num_layers(architecture, layouts),
        "head_dim": _multiple_from(_HEAD_DIM, block),
        "ffn_dim": _multiple_from(_FFN_DIM, tp * block),
        **_heads(architecture, layouts),
    }
    if architecture.sliding_window is not None:
        sizes["sliding_window"] = min(architecture.sliding_window, _WINDOW)
        # In turns, so that few layers have both kinds.
        sizes["layer_types"] = tuple(dict.fromkeys(architecture.layer_types))
    if isinstance(architecture, MoEArchitecture):
        sizes |= {"num_dense_layers": min(architecture.num_dense_layers, 1), **_experts(architecture, layouts)}
        if architecture.latent is not None:
            sizes |= _latent(architecture.latent)
    return architecture.replace(**sizes)


def _num_layers(architecture: LlamaArchitecture, layouts: Sequence[Layout]) -> int:
    """Return enough blocks for every stage, and for one dense and two mixture layers in a mixture of experts."""
    num_dense = min(architecture.num_dense_layers, 1) if isinstance(architecture, MoEArchitecture) else 0
    last_boundary = max((max(layout.stage_boundaries or (0,)) for layout in layouts), default=0)
    return max(num_dense + 2, last_boundary + 1, *(layout.num_stages for layout in layouts))


def _heads(architecture: LlamaArchitecture, layouts: Sequence[Layout]) -> dict[str, int]:
    """Return head counts that the same degrees divide, with grouped queries if the original has them."""
    degrees = {layout.tp * (layout.cp if layout.cp_method == "ulysses" else 1) for layout in layouts}
    degrees |= {layout.tp for layout in layouts}
    num_kv_heads = _smallest_alike(architecture.num_kv_heads, degrees)
    needed = math.lcm(*(degree for degree in degrees if architecture.num_heads % degree == 0))
    queries_per_key = math.lcm(
        _smallest_factor(architecture.num_heads // architecture.num_kv_heads),
        needed // math.gcd(needed, num_kv_heads),
    )
    return {"num_heads": num_kv_heads * queries_per_key, "num_kv_heads": num_kv_heads}


def _experts(architecture: MoEArchitecture, layouts: Sequence[Layout]) -> dict[str, Any]:
    router = architecture.router
    num_groups = _smallest_factor(router.num_groups)
    groups_per_token = max(1, num_groups * router.groups_per_token // router.num_groups)
    # At least two experts per rank and per group, since one is a special case.
    unit = math.lcm(num_groups, *(layout.ep for layout in layouts if architecture.num_experts % layout.ep == 0))
    return {
        "num_experts": unit * max(2, -(-_MIN_EXPERTS // unit)),
        "experts_per_token": min(architecture.experts_per_token, 2),
        "num_shared_experts": min(architecture.num_shared_experts, 1),
        "expert_ffn_dim": _EXPERT_FFN_DIM * math.lcm(*(layout.tp for layout in layouts)),
        "router": router.replace(num_groups=num_groups, groups_per_token=groups_per_token),
    }


def _latent(latent: LatentAttention) -> dict[str, Any]:
    small = LatentAttention(
        query_rank=None if latent.query_rank is None else _LATENT_DIM,
        kv_rank=_LATENT_DIM,
        plain_head_dim=_HEAD_DIM,
        # Another width than the plain part, so that confusing them fails.
        rope_head_dim=_HEAD_DIM // 2,
        value_head_dim=_HEAD_DIM,
    )
    return {"latent": small, "head_dim": small.plain_head_dim + small.rope_head_dim}


def _smallest_alike(size: int, degrees: set[int]) -> int:
    """Return the smallest divisor of `size` that the same `degrees` divide; above 1 if `size` is."""
    alike = math.lcm(*(degree for degree in degrees if size % degree == 0))
    return alike if alike > 1 else _smallest_factor(size)


def _smallest_factor(size: int) -> int:
    """Return the smallest prime factor of `size`, 1 of 1."""
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)


def _multiple_from(size: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is at least `size`."""
    return -(-size // divisor) * divisor
