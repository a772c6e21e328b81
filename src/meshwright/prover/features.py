"""Features of layouts, and the combinations of two that a proof covers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import split_problems
from meshwright.spec.layout.covering import COVERED_AXES
from meshwright.spec.layout.layout import SCHEDULES, Layout
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.proof import LayoutProof


@dataclass(frozen=True, eq=False)
class Feature:
    """One axis, schedule or option of a layout."""

    name: str
    is_in: Callable[[Layout], bool]
    smallest: Mapping[str, Any]
    """Keys of the smallest layout that has it."""


def _axis(name: str) -> Feature:
    return Feature(name, lambda layout: getattr(layout, name) > 1, {name: 2})


def _choice(name: str, key: str, value: Any, **needs: Any) -> Feature:
    def is_in(layout: Layout) -> bool:
        return bool(getattr(layout, key) == value) and all(getattr(layout, need) > 1 for need in needs)

    return Feature(name, is_in, {key: value, **needs})


AXES = tuple(_axis(name) for name in COVERED_AXES)
"""The axes, each above 1."""

PIPELINES = tuple(_choice(name, "schedule", name, pp=2) for name in SCHEDULES)
"""The pipeline schedules."""

CHOICES = (
    *(_choice(f"cp by {method}", "cp_method", method, cp=2) for method in ("all-gather", "ring", "ulysses")),
    Feature("etp", lambda layout: layout.etp > 1, {"tp": 2, "etp": 2}),
    _choice("recompute selective", "activation_checkpoint", "selective"),
    _choice("recompute full", "activation_checkpoint", "full"),
    Feature("compile (aot_eager)", lambda layout: layout.compile, {"compile": True, "compile_backend": "aot_eager"}),
    _choice("reshard always", "reshard_after_forward", "always"),
    _choice("reshard never", "reshard_after_forward", "never"),
    Feature(
        "reshard in groups",
        lambda layout: isinstance(layout.reshard_after_forward, int),
        {"dp_shard": 4, "reshard_after_forward": 2},
    ),
    _choice("CPU offload", "cpu_offload", True),
    Feature(
        "reduce each microbatch",
        lambda layout: layout.reduces_each_microbatch,
        {"gradient_sync": "microbatch"},
    ),
    Feature(
        "reduce once a step",
        lambda layout: layout.fsdp > 1 and not layout.reduces_each_microbatch,
        {"dp_shard": 2, "gradient_sync": "step"},
    ),
)
"""All other options of a layout that an error could make change numerics."""


@dataclass(frozen=True)
class Combination:
    """Two features, or one, and the proofs of layouts that have them."""

    features: tuple[Feature, ...]
    proofs: Sequence[LayoutProof]
    impossible: str | None
    """Why no layout of the model can have both; None if one can."""

    @property
    def worst(self) -> LayoutProof | None:
        """Return the proof closest to its bar, or one that failed; None without proofs."""
        return max(self.proofs, key=_badness, default=None)


def _badness(one: LayoutProof) -> tuple[bool, float]:
    return not one.holds, one.worst.share if one.worst is not None else 0.0


def combination(job: Job, proofs: Sequence[LayoutProof], *features: Feature) -> Combination:
    """Return the proofs of `job` that cover `features`."""
    covered = [one for one in proofs if all(feature.is_in(one.layout) for feature in features)]
    return Combination(features, covered, None if covered else _impossible(job, features))


def _impossible(job: Job, features: Sequence[Feature]) -> str | None:
    """Return why the smallest layout with all `features` is invalid, or None."""
    keys: dict[str, Any] = {}
    for feature in features:
        for key, value in feature.smallest.items():
            keys[key] = max(value, keys.get(key, value)) if isinstance(value, int) else value
    # Experts, and groups of ranks, need ranks of other axes.
    wider = {"dp_shard": 2 * keys.get("dp_shard", 1)}
    problems = [
        split_problems(Layout(**attempt), resolve_architecture(job.model), job.train.seq_len)
        for attempt in (keys, keys | wider)
    ]
    return None if any(not found for found in problems) else problems[0][0]
