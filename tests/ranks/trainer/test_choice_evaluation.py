"""Accuracy on questions while a model trains: one process, any layout and the command afterwards find the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed as dist

import meshwright as mw
from compiler_warnings import DYNAMO_WARNINGS
from meshwright.data.questions.continuation import ContinuationEncoder
from meshwright.data.questions.question_set import QuestionSet
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.inference.loaded_model import load_model
from meshwright.inference.log_likelihood import log_likelihoods
from meshwright.spec.job.job import Job
from meshwright.spec.run.run_report import read_metrics
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.choice_evaluation import ChoiceEvaluation
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import TINY_MODEL, tiny_job, train_on_ranks

pytestmark = DYNAMO_WARNINGS

QUESTIONS = [
    {"query": "3 times 3 is", "choices": ["9;", "999999;", "nine"], "answer": 0},
    {"query": "the root of 25", "choices": ["is 5.", "si 5."], "answer": 0},
    {"query": "", "choices": ["12 times 12", "semit 21"], "answer": 0},
    # Longer than train.seq_len = 32: cut off at its beginning.
    {"query": "7 times 7 is 49; " * 4 + "the", "choices": ["root", "toor", "49", "otro"], "answer": 0},
    {"query": "Größe ", "choices": ["ü", "xyz"], "answer": 1},
]
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"microbatch_size": 1, "loss_chunks": 3}],
    2: [
        {"dp_shard": 2, "microbatch_size": 2},
        {"tp": 2},
        {"tp": 2, "loss_chunks": 2},
        {"cp": 2},
        {"pp": 2, "microbatch_size": 1},
        {"dp_replicate": 2, "dp_shard": 1},
    ],
}


class Found(NamedTuple):
    accuracies: dict[str, float]
    log_likelihoods: list[float]


def job_with_questions(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    file = folder / "choices.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return tiny_job(folder, evaluation={"source": str(file)}, **sections)


def evaluate_layouts(jobs: list[dict[str, Any]]) -> list[Found]:
    """Return what this rank finds for the initial weights of each job."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        training = Training.build(Job.from_dict(job), ranks)
        choices = ChoiceEvaluation.of(training.step)
        assert choices is not None
        accuracies = {name: mean.value for name, mean in choices().items()}
        found.append(Found(accuracies, choices.log_likelihoods()))
        training.loader.close()
    return found


def test_every_layout_finds_the_log_likelihoods_of_one_process(tmp_path: Path) -> None:
    reference: Found | None = None
    for num_ranks, layouts in LAYOUTS.items():
        jobs = [job_with_questions(tmp_path, layout=layout) for layout in layouts]
        for on_rank in run_ranks(evaluate_layouts, num_ranks, jobs):
            for layout, found in zip(layouts, on_rank, strict=True):
                reference = reference or found
                assert found.log_likelihoods == pytest.approx(reference.log_likelihoods, rel=1e-5), layout
                assert found.accuracies == reference.accuracies


@pytest.mark.long
def test_combined_layouts_find_the_same(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {"tp": 2, "pp": 2, "microbatch_size": 1},
        {"cp": 2, "dp_shard": 2, "cp_method": "ring"},
        {"pp": 2, "dp_shard": 2, "microbatch_size": 1, "schedule": "Interleaved1F1B", "virtual_stages": 2},
        {"tp": 2, "dp_shard": 2, "compile_loss": True, "loss_chunks": 3},
        {"tp": 2, "dp_shard": 2, "compile_loss": True},
    ]
    deep = {"options": {**TINY_MODEL["options"], "num_layers": 4}}
    masked = {"mask_documents": True}
    jobs = [job_with_questions(tmp_path, model=deep, layout=layout, data=masked) for layout in ({}, *layouts)]
    (one,) = run_ranks(evaluate_layouts, 1, jobs[:1])
    for on_rank in run_ranks(evaluate_layouts, 4, jobs[1:]):
        for layout, found in zip(layouts, on_rank, strict=True):
            assert found.log_likelihoods == pytest.approx(one[0].log_likelihoods, rel=1e-5), layout
            assert found.accuracies == one[0].accuracies


@pytest.mark.long
def test_experts_find_the_same_on_their_ranks(tmp_path: Path) -> None:
    model = {
        "source": "moe-4m",
        "options": {
            **{"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 48},
            **{"expert_ffn_dim": 16, "num_experts": 4, "experts_per_token": 2},
        },
    }
    layouts = ({}, {"dp_shard": 2, "ep": 2})
    jobs = [{**job_with_questions(tmp_path, layout=layout), "model": model} for layout in layouts]
    (one,) = run_ranks(evaluate_layouts, 1, jobs[:1])
    for on_rank in run_ranks(evaluate_layouts, 2, jobs[1:]):
        assert on_rank[0].log_likelihoods == pytest.approx(one[0].log_likelihoods, rel=1e-5)


def test_a_run_logs_what_the_command_finds_afterwards(tmp_path: Path) -> None:
    job = job_with_questions(tmp_path, checkpoint={"interval": 2, "keep": 9}, train={"steps": 5})
    job["evaluation"]["interval"] = 2
    finished = train_on_ranks(job, tmp_path / "run", 2)
    rows = [json.loads(line) for line in finished.run.metrics.read_text().splitlines()]
    logged = {row["step"]: row for row in rows if "acc" in row}
    # The last step is evaluated in any case.
    assert list(logged) == [2, 4, 5]
    for step, row in logged.items():
        found = mw.evaluate(finished.run.folder, [job["evaluation"]["source"]], step=step)
        assert {one.measure: one.value for one in found.measures} == {
            name: row[name] for name in ("acc", "acc_norm", "acc_bytes")
        }
        assert found.max_tokens == 32
    assert finished.manifest.results["acc"] == logged[5]["acc"]
    log = finished.run.rank_log(0).read_text()
    assert "step 4/5 | acc 0." in log
    assert "5 questions of " in log
    assert "choices.jsonl every 2 steps and at the end; 4 of 13 contexts lose their beginning" in log
    # Readers of metrics take the rows for what they are.
    assert len(read_metrics(finished.run)) == 5
    assert any(event["kind"] == "validation" for event in map(json.loads, finished.run.events.read_text().splitlines()))


def test_the_command_finds_the_log_likelihoods_of_training(tmp_path: Path) -> None:
    # So that the checkpoint holds the initial weights.
    job = job_with_questions(tmp_path, train={"steps": 1}, optimizer={"learning_rate": 1e-30})
    finished = train_on_ranks(job, tmp_path / "run", 1)
    (found,) = run_ranks(evaluate_layouts, 1, [job])
    encoder = ContinuationEncoder(ByteTokenizer(), max_tokens=32)
    questions = QuestionSet.load(Path(job["evaluation"]["source"]), encoder)
    loaded = load_model(finished.run.folder)
    values = [one.value for one in log_likelihoods(loaded.model, questions.continuations, batch_size=3)]
    assert values == pytest.approx(found[0].log_likelihoods, rel=1e-5)
