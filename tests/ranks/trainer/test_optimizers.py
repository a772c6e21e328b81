"""Muon, bfloat16 states and updates in backward: every layout gives what one process gives, and resumes to the bit."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout, LayoutRequest
from recorded_jobs import require_as_one_process
from run_ranks import run_ranks
from training_runs import TINY_MODEL, FinishedRun, tiny_job, train_on_this_rank

MIXTURE = {
    "source": "moe-4m",
    "options": {
        **TINY_MODEL["options"],  # type: ignore[dict-item]
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_ffn_dim": 16,
        "num_dense_layers": 1,
    },
}
MUON: dict[str, Any] = {"name": "muon"}
LOW: dict[str, Any] = {"name": "muon", "state_dtype": "bfloat16"}
Case = tuple[dict[str, Any], dict[str, Any], Layout]
"""Model, optimizer and a layout of 4 ranks."""
CASES: list[Case] = [
    (TINY_MODEL, MUON, Layout(dp_shard=2, tp=2)),
    # Matrices of experts are cut along their rows, which 3 experts leave to FSDP2, and by etp.
    (MIXTURE, LOW, Layout(dp_shard=2, tp=2, ep=2, etp=2)),
]
MORE: list[Case] = [
    (TINY_MODEL, {"state_dtype": "bfloat16"}, Layout(dp_shard=2, cp=2)),
    (TINY_MODEL, MUON, Layout(dp_shard=2, dp_replicate=2)),
    (TINY_MODEL, MUON, Layout(pp=2, tp=2)),
    (TINY_MODEL, MUON, Layout(dp_shard=4)),
    (MIXTURE, MUON, Layout(dp_shard=2, tp=2, ep=4)),
    (MIXTURE, MUON, Layout(dp_shard=4, ep=2)),
    (MIXTURE, MUON, Layout(dp_shard=2, tp=2, etp=2)),
]


def job_of(folder: Path, case: Case, layout: Layout) -> Job:
    model, optimizer, _ = case
    # As the prover has it: a usual eps makes of rounding in a gradient of zero a step like any other.
    rates = {"eps": 1e-2, "learning_rate": 1e-2, "warmup_steps": 0, "max_grad_norm": 0.5}
    values = tiny_job(folder, optimizer={**rates, **optimizer}, precision={"compute": "float64"})
    values["train"] |= {"steps": 3, "global_batch_size": 8}
    return Job.from_dict({**values, "model": model, "layout": LayoutRequest(**layout.to_dict()).to_dict()})


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.long)], ids=["few", "more"])
def test_every_layout_updates_as_one_process(tmp_path: Path, cases: list[Case]) -> None:
    alone = [job_of(tmp_path, case, Layout()) for case in cases]
    require_as_one_process([job_of(tmp_path, case, case[2]) for case in cases], alone, 4)


def train_all(runs: list[tuple[dict[str, Any], str, bool]]) -> list[int]:
    return [train_on_this_rank(*run) for run in runs]


def trained(folder: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, FinishedRun]:
    """Return the run of each job on two ranks, in a folder of its name."""
    codes = run_ranks(train_all, 2, [(job, str(folder / name), False) for name, job in jobs.items()])
    return {name: FinishedRun(folder / name, codes[0]) for name in jobs}


def test_runs_resume_to_the_bit_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    job, half = tiny_job(tmp_path, optimizer=LOW), tiny_job(tmp_path, optimizer=LOW, train={"stop_after": 3})
    whole = trained(tmp_path, {"whole": job, "halves": half})["whole"]
    shutil.copytree(tmp_path / "halves", tmp_path / "alone")
    run_ranks(train_on_this_rank, 2, job, str(tmp_path / "halves"), True)
    run_ranks(train_on_this_rank, 1, job, str(tmp_path / "alone"), True)
    halves, alone = (FinishedRun(tmp_path / name, []) for name in ("halves", "alone"))
    assert whole.parameter_hash == halves.parameter_hash
    assert whole.losses == halves.losses
    # On another number of ranks gradients, and so the updates, are rounded differently.
    assert alone.losses == pytest.approx(whole.losses, rel=1e-4)


REPLICAS = {"dp_replicate": 2, "dp_shard": 1}


@pytest.mark.parametrize(
    "layouts",
    [
        {"shards": {"dp_shard": 2}},
        pytest.param({"shards": {"dp_shard": 2}, "replicas": REPLICAS}, marks=pytest.mark.long),
    ],
    ids=["shards", "replicas too"],
)
def test_updates_in_backward_are_the_same_bits(tmp_path: Path, layouts: dict[str, dict[str, int]]) -> None:
    after = {"max_grad_norm": 0.0, "groups": [{"match": "*.value.weight", "learning_rate_ratio": 0.5}]}
    inside = {**after, "in_backward": True}
    jobs = {
        f"{kind} {when}": tiny_job(tmp_path, optimizer=optimizer, layout={**layout, "microbatch_size": 4})
        for kind, layout in layouts.items()
        for when, optimizer in (("after", after), ("inside", inside))
    }
    found = trained(tmp_path, jobs)
    for kind in layouts:
        late, early = found[f"{kind} after"], found[f"{kind} inside"]
        assert late.parameter_hash == early.parameter_hash
        assert late.losses == early.losses
        assert late.grad_norms == pytest.approx(early.grad_norms, rel=1e-6)
        # Sums of two addends are the same to the bit on any rank.
        assert late.losses == pytest.approx(found["shards after"].losses, rel=1e-6)


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: install meshwright[torchao]")
def test_8_bit_states_resume_to_the_bit_and_on_another_layout(tmp_path: Path) -> None:
    options = {**TINY_MODEL["options"], "dim": 128, "num_heads": 4, "head_dim": 64, "ffn_dim": 256}  # type: ignore[dict-item]
    model = {"source": "llama-1m", "options": options}
    job = tiny_job(tmp_path, model=model, optimizer={"state_dtype": "int8"})
    first = {**job, "train": {**job["train"], "stop_after": 3}}
    run_ranks(train_all, 2, [(job, str(tmp_path / "whole"), False), (first, str(tmp_path / "halves"), False)])
    shutil.copytree(tmp_path / "halves", tmp_path / "cut")
    run_ranks(train_on_this_rank, 2, job, str(tmp_path / "halves"), True)
    across = {**job, "layout": {"dp_shard": 1, "tp": 2}}
    run_ranks(train_on_this_rank, 2, across, str(tmp_path / "cut"), True)
    whole, halves, cut = (FinishedRun(tmp_path / name, []) for name in ("whole", "halves", "cut"))
    assert whole.parameter_hash == halves.parameter_hash
    assert cut.losses == pytest.approx(whole.losses, rel=1e-3)
