"""Counts of a model's parameters."""

from __future__ import annotations

from meshwright.spec.model.model_spec import ModelSpec


def num_active_matmul_parameters(spec: ModelSpec) -> int:
    """Return the weights that each token is multiplied with: a tied head counts, an embedding does not."""
    return sum(group.count * group.num_matmul_parameters for group in spec.groups)
