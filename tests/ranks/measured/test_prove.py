"""prove: layouts that train the same model pass, each planted fault is found, and what cannot be proven is said."""

import json
import re
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.config.load import load_job
from meshwright.prover.small_job import small_job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.proof import Proof
from recorded_jobs import record_all
from repository import ROOT
from run_ranks import run_ranks

DENSE = """
[model]
source = "llama3-8b"
options = {qk_norm = true, tie_embeddings = true}
[data]
mask_documents = true
"""
MIXTURE = """
[model]
source = "moe-4m"
"""
OWN = """
[model]
source = "fragile:Fragile"
[data]
source = "fragile:Numbers"
[train]
global_batch_size = 4
"""
FRAGILE = """
import os
import torch
from torch import nn

class Numbers:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3,), index / 40), torch.tensor(float(index % 3))

class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        if os.environ["RANK"] == "1" and "FRAGILE" in os.environ:
            raise ValueError("broken on purpose")
        return self.linear(x).squeeze(-1)

    def loss(self, output, targets):
        return (output - targets).square().mean()
"""


def job_file(folder: Path, text: str) -> str:
    file = folder / "job.toml"
    file.write_text(text)
    return str(file)


def prove(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Proof, str]:
    """Return the exit code, what was found, and what was said on the way."""
    with pytest.raises(SystemExit) as ending:
        run(["prove", *arguments, "--json"])
    printed = capsys.readouterr()
    assert isinstance(ending.value.code, int)
    return ending.value.code, Proof.from_json(printed.out), printed.err


def test_layouts_of_a_dense_model_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ["dp_shard=2", "tp=2", "pp=2,microbatch_size=2,schedule=ZBVZeroBubble"]
    page = tmp_path / "page.md"
    code, proof, said = prove(capsys, job_file(tmp_path, DENSE), *layouts, "--matrix", str(page), "--steps", "2")
    assert code == 0
    assert "| `dp_shard=2` | 2 | " in page.read_text()
    assert [one.holds for one in proof.layouts] == [True] * 3
    assert [difference.kind for difference in proof.layouts[0].differences] == ["loss", "gradient", "weight"]
    # Another order of sums gives other bits: a difference of zero everywhere would mean that nothing was compared.
    assert any(difference.relative > 0 for one in proof.layouts for difference in one.differences)
    assert {change.key: change.proven for change in proof.changes}["num_layers"] == "4"
    assert said.splitlines()[-1].startswith("[3/3] pp=2,microbatch_size=2,schedule=ZBVZeroBubble: holds (")


@pytest.mark.long
def test_learned_positions_hold_in_every_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 288, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    job = job_file(tmp_path, f'[model]\nsource = "{tmp_path / "gpt2.json"}"\n[data]\nmask_documents = true\n')
    code, proof, _ = prove(capsys, job, "tp=2,cp=2", "pp=2,dp_shard=2", "--exact", "--steps", "2")
    assert code == 0
    assert [one.holds for one in proof.layouts] == [True, True]


def test_layouts_of_a_mixture_hold_in_float64_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [job_file(tmp_path, MIXTURE), "dp_shard=2,ep=2", "tp=2,etp=2", "--exact", "--repeat", "--steps", "2"]
    code, proof, _ = prove(capsys, *arguments)
    assert code == 0
    assert [one.repeats for one in proof.layouts] == [True, True]
    assert {difference.bar for one in proof.layouts for difference in one.differences} == {1e-11}
    assert {difference.relative > 1e-13 for one in proof.layouts for difference in one.differences} == {False}


@pytest.mark.long
def test_selective_recomputation_holds_next_to_parts_that_stay_eager(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inductor writes over what selective recomputation has saved: such blocks are not compiled."""
    compiled = "activation_checkpoint=selective,compile=true"
    layouts = (f"dp_shard=2,ep=2,{compiled}", f"cp=2,cp_method=ring,{compiled}")
    code, proof, _ = prove(capsys, job_file(tmp_path, MIXTURE), *layouts, "--steps", "2")
    assert code == 0
    assert [one.holds for one in proof.layouts] == [True, True]


def test_mixed_precision_is_proven_with_wider_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_file(tmp_path, DENSE)
    code, proof, _ = prove(capsys, job, "tp=2", "--mixed", "--steps", "2")
    assert (code, proof.precision, proof.job.precision.compute) == (0, "mixed", "bfloat16")
    # bfloat16 shows: the same layout in float32 is a thousand times closer.
    assert max(difference.relative for difference in proof.layouts[0].differences) > 1e-3
    code, proof, _ = prove(capsys, job, "tp=2", "--mixed", "--steps", "1", "--plant", "tp")
    assert (code, proof.layouts[0].holds) == (70, False)
    assert run(["prove", job, "tp=2", "--mixed", "--exact"]) == 2


@pytest.mark.parametrize(
    ("axis", "layout", "text"),
    [
        # Of tp one is planted in mixed precision above, and of dp one in a job of fine-tuning below.
        pytest.param("tp", "tp=2", DENSE, marks=pytest.mark.long),
        ("cp", "cp=2", DENSE),
        pytest.param("cp", "cp=2,cp_method=ulysses", DENSE, marks=pytest.mark.long),
        ("pp", "pp=2", DENSE),
        pytest.param("dp", "dp_shard=2", DENSE, marks=pytest.mark.long),
        pytest.param("dp", "dp_replicate=2", DENSE, marks=pytest.mark.long),
        ("ep", "dp_shard=2,ep=2", MIXTURE),
    ],
)
def test_a_planted_fault_is_found(
    axis: str, layout: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        run(["prove", job_file(tmp_path, text), layout, "--plant", axis, "--steps", "2"])
    assert ending.value.code == 70
    table = capsys.readouterr().out
    assert "WRONG" in table
    assert re.search(r"(gradient|weight) of [a-z]+\..*weight, step [12]", table)
    assert f"A fault was planted in {axis}, and found" in table


def test_a_fault_that_no_layout_has_room_for_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", job_file(tmp_path, DENSE), "tp=2", "--plant", "pp"]) == 2
    assert "--plant pp has no effect: no layout of tp=2 has pp > 1" in capsys.readouterr().err


def test_layouts_that_do_not_fit_the_job_itself_are_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The small model could be given 3 heads; the job's own has 32.
    assert run(["prove", job_file(tmp_path, DENSE), "dp_shard=2", "tp=3", "ep=2"]) == 2
    printed = capsys.readouterr()
    assert "tp=3: layout.tp = 3 does not divide the model's num_heads = 32" in printed.err
    assert "ep=2: layout.ep = 2" in printed.err
    assert "holds" not in printed.err + printed.out


def test_more_processes_than_a_machine_has_room_for_are_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_file(tmp_path, DENSE)
    assert run(["prove", job, "dp_shard=64,tp=2"]) == 2
    said = capsys.readouterr().err
    assert "128 ranks, each a process on this machine, exceed --max-ranks = 64" in said
    assert "prove dp_shard=2,tp=2, the same axes with small degrees, or set --max-ranks 128" in said
    assert run(["prove", job, "dp_shard=2,tp=2", "--max-ranks", "3"]) == 2


def test_a_model_of_ones_own_is_run_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, proof, _ = prove(capsys, job_file(tmp_path, OWN), "dp_shard=2", "dp_replicate=2")
    assert code == 0
    assert proof.num_parameters == 4
    assert proof.job.global_batch_size == 4


def test_a_rank_that_fails_is_told_and_the_next_layout_is_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("FRAGILE", "yes")
    code, proof, said = prove(capsys, job_file(tmp_path, OWN), "dp_shard=2", "dp_shard=1")
    assert code == 70
    assert [one.holds for one in proof.layouts] == [False, True]
    assert proof.layouts[0].problem == "rank 1: ValueError: broken on purpose"
    assert "[1/2] dp_shard=2: FAILS: rank 1: ValueError: broken on purpose" in said


@pytest.mark.parametrize("task", ["sft", pytest.param("dpo", marks=pytest.mark.long)])
def test_a_fine_tuning_job_is_proven_as_it_is(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(ROOT / "examples" / f"tiny-{task}.toml")
    code, proof, said = prove(capsys, job, "dp_shard=2", "cp=2", "tp=2", "--exact")
    assert code == 0
    assert proof.job.train.task == task
    assert "proving with the job's own data: 36 " in said
    # Ranks have rows with other numbers of targets: each must have its own.
    _, proof, _ = prove(capsys, job, "dp_shard=2", "--exact", "--plant", "dp")
    assert not proof.layouts[0].holds


def test_targets_that_do_not_count_are_of_the_proof(tmp_path: Path) -> None:
    """One process learns another loss where the user's part counts, too."""
    job = load_job(ROOT / "examples" / "tiny-sft.toml").job
    small = small_job(job, [Layout()], tmp_path / "sums.jsonl", 1, "float64").job
    everything = small.replace(data=small.data.replace(train_on="all"))
    [[own, whole]] = run_ranks(record_all, 1, [small, everything])
    assert abs(own.losses[0] - whole.losses[0]) > 1e-4
