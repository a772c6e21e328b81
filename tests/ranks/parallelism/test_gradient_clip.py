"""Clipping leaves gradients as they are whose norm is below the limit; `prove` clips the others."""

from __future__ import annotations

from pathlib import Path

from training_runs import tiny_job, train_on_ranks


def test_a_norm_below_the_limit_changes_nothing(tmp_path: Path) -> None:
    hashes = {}
    for max_norm in (0.0, 1e3):
        job = tiny_job(tmp_path, optimizer={"max_grad_norm": max_norm})
        finished = train_on_ranks(job, tmp_path / f"run-{max_norm}", 2)
        assert max(finished.grad_norms.values()) < 1e3
        hashes[max_norm] = finished.parameter_hash
    # torch.clamp gives exactly 1, and a product with 1 has the same bits.
    assert hashes[0.0] == hashes[1e3]
