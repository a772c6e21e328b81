"""`layout.activation_checkpoint = "auto"`: only as much is recomputed as a budget asks for, in the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli.main import run
from meshwright.config.write import to_toml
from meshwright.errors import ExitCode
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest
from meshwright.spec.step.simulation_report import SimulationReport
from training_runs import tiny_job

pytestmark = pytest.mark.long
CLUSTER = "h100-ib400:2"
WIDE = {"options": {"dim": 64, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 256}}
"""A model whose activations are most of its memory."""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("job")
    job = tiny_job(folder, model=WIDE, train={"steps": 3, "seq_len": 64})
    (folder / "job.toml").write_text(to_toml(Job.from_dict(job)))
    return folder / "job.toml"


def simulated(job_file: Path, capsys: pytest.CaptureFixture[str], *keys: str) -> SimulationReport:
    with pytest.raises(SystemExit) as ending:
        run(["simulate", str(job_file), *keys, "--cluster", CLUSTER, "--json"])
    assert ending.value.code == ExitCode.DONE
    return SimulationReport.from_json(capsys.readouterr().out)


def asked_bytes(found: SimulationReport) -> list[int]:
    """Return the most bytes that tensors of each pipeline rank ask for at once, when most is allocated."""
    assert found.outcome is not None
    return [sum(rank.by_role.values()) for rank in found.outcome.memory]


def saves(found: SimulationReport) -> list[str]:
    assert found.layout is not None
    return [*(found.layout.activation_checkpoint_blocks or [found.layout.activation_checkpoint] * 6)]


@pytest.mark.parametrize("axis", ["dp_shard", "pp"])
def test_the_first_stages_compute_most_again_and_every_rank_fits(
    axis: str, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = {"dp_shard": 1, axis: 2}
    keys = [*(f"layout.{name}={degree}" for name, degree in split.items()), "layout.microbatch_size=2"]
    most, least = (
        max(asked_bytes(simulated(job_file, capsys, *keys, f"layout.activation_checkpoint={kind}")))
        for kind in ("none", "full")
    )
    budget = (most + least) // 2
    found = simulated(
        job_file, capsys, *keys, "layout.activation_checkpoint=auto", f"layout.memory_budget_bytes={budget}"
    )
    assert least < max(asked_bytes(found)) <= budget
    chosen = saves(found)
    assert set(chosen) != {"none"}
    # What check prices may differ by a block of each pipeline rank.
    asked = (*keys, "layout.activation_checkpoint=auto", f"layout.memory_budget_bytes={budget}")
    priced = mw.check(str(job_file), *asked, "cluster.name=h100-ib400", ranks=2).figures.layout
    assert priced is not None
    of_check = priced["activation_checkpoint_blocks"] or [priced["activation_checkpoint"]] * 6
    differing = [at for at in range(6) if of_check[at] != chosen[at]]
    assert len([at for at in differing if at < 3]) <= 1
    assert len([at for at in differing if at >= 3]) <= 1
    first, last = chosen[:3], chosen[3:]
    assert last.count("none") >= first.count("none")


def test_a_run_takes_the_choice_and_ends_in_the_same_bits(
    job_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = ["layout.dp_shard=2", "layout.microbatch_size=2"]
    none, full = (
        max(asked_bytes(simulated(job_file, capsys, *keys, f"layout.activation_checkpoint={kind}")))
        for kind in ("none", "full")
    )
    said: dict[str, list[str]] = {
        "none": ["layout.activation_checkpoint=none"],
        "auto": ["layout.activation_checkpoint=auto", f"layout.memory_budget_bytes={(none + full) // 2}"],
    }
    ended = {}
    for name, choice in said.items():
        folder = tmp_path / name
        with pytest.raises(SystemExit) as ending:
            run(["train", str(job_file), *keys, *choice, "--ranks", "2", f"run.dir={folder}"])
        assert ending.value.code == ExitCode.DONE
        ended[name] = Manifest.from_json((folder / "manifest.json").read_text())
    assert ended["none"].attempts[-1].layout.activation_checkpoint_blocks is None
    assert ended["auto"].attempts[-1].layout.activation_checkpoint_blocks is not None
    assert ended["none"].results["parameter_hash"] == ended["auto"].results["parameter_hash"]


def test_a_budget_that_nothing_fits_in_is_refused_with_what_is_needed(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["layout.activation_checkpoint=auto", "layout.memory_budget_bytes=100000"]
    assert run(["simulate", str(job_file), *budget, "--cluster", CLUSTER]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert 'even with layout.activation_checkpoint = "full"' in said
    assert "raise layout.memory_budget_bytes to" in said
