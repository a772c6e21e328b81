"""The token accuracy of a step is that of transformers, one conversation at a time, on every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.data.dataset import build_dataset
from meshwright.parallelism.losses.token_accuracy import TokenAccuracy
from meshwright.parallelism.mesh import build_meshes
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import train_on_ranks

# Doubled letters, which a model that repeats its input gets right, and others.
CHATS = [("Hi?", "Heelloo!! to youu"), ("Hm", "Weelll"), ("A", "aaabbbc"), ("Two", "2, too, and foour")]
NONE, FOUR, PAIRS = ("none", 60, 4), ("whole", 152, 1), ("whole", 80, 2)
"""Packing, tokens of a row, rows of the batch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of conversations and of a Llama that mostly repeats its input."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("accuracy")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=258, intermediate_size=48, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path / "model")
    chats = ([{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in CHATS)
    (path / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    return path


def job(folder: Path, rows: tuple[str, int, int], compute: str = "float64", **layout: Any) -> dict[str, Any]:
    packing, seq_len, num_rows = rows
    data = {"source": str(folder / "chats.jsonl"), "cache_dir": str(folder / "cache"), "packing": packing}
    return {
        "model": {"source": str(folder / "model/config.json"), "initial_weights": str(folder / "model")},
        "data": {**data, "mask_documents": packing == "whole", "validation_fraction": 0.0},
        "train": {"task": "sft", "steps": 1, "seq_len": seq_len, "global_batch_size": num_rows},
        "precision": {"compute": compute},
        "layout": {"dp_shard": 1, **layout},
        "run": {"device": "cpu"},
    }


def of_transformers(folder: Path) -> float:
    """Return the accuracy of transformers' model, on each conversation alone."""
    import transformers  # noqa: PLC0415

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    parsed, num_right, num_targets = Job.from_dict(job(folder, NONE)), 0, 0
    dataset = build_dataset(parsed.data, parsed.train.seq_len, "sft")
    for row in range(dataset.num_training_samples):
        inputs, targets = (torch.from_numpy(one) for one in dataset.read(row)[:2])
        with torch.no_grad():
            found = model(inputs[None]).logits[0].argmax(-1)
        num_right += int(((found == targets) & (targets != -100)).sum())
        num_targets += int((targets != -100).sum())
    return num_right / num_targets


def accuracies(jobs: list[dict[str, Any]]) -> list[float]:
    """Return the accuracy of a step of each job on this rank."""
    found = []
    for one in jobs:
        parsed = Job.from_dict(one)
        training = Training.build(parsed, Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
        found.append(training.step(1, training.loader.microbatches(0)).loss_metrics["token_accuracy"])
        training.loader.close()
    return found


def test_accuracy_is_that_of_transformers_on_every_layout(folder: Path) -> None:
    expected = of_transformers(folder)
    assert 0.2 < expected < 0.8
    alone = [(NONE, {"microbatch_size": 2}), (FOUR, {}), (FOUR, {"loss_chunks": 3}), (PAIRS, {"microbatch_size": 1})]
    shared = [
        (PAIRS, {"dp_shard": 2}),
        (NONE, {"dp_replicate": 2, "loss_chunks": 4}),
        (FOUR, {"cp": 2, "cp_method": "all-gather"}),
        (PAIRS, {"cp": 2, "cp_method": "ring", "loss_chunks": 2}),
        (FOUR, {"tp": 2}),
        (PAIRS, {"tp": 2, "loss_chunks": 3}),
        (NONE, {"pp": 2, "microbatch_size": 2}),
        (PAIRS, {"pp": 2, "loss_chunks": 2}),
    ]
    for num_ranks, cases in ((1, alone), (2, shared)):
        jobs = [job(folder, rows, **layout) for rows, layout in cases]
        for case, found in zip(cases, zip(*run_ranks(accuracies, num_ranks, jobs), strict=True), strict=True):
            assert found == (expected,) * num_ranks, case


def test_accuracy_of_an_adapter_and_of_held_out_conversations(folder: Path, tmp_path: Path) -> None:
    own = job(folder, NONE, "float32") | {"adapter": {"kind": "lora", "rank": 2}}
    own["data"]["validation_fraction"] = 0.5
    own["train"] |= {"global_batch_size": 2, "validation_interval": 1}
    own["optimizer"] = {"learning_rate": 1e-30}
    finished = train_on_ranks(own, tmp_path / "run", 1)
    (step,), (held_out,) = finished.rows, finished.validation
    assert 0 < step["token_accuracy"] < 1
    assert 0 < held_out["validation_token_accuracy"] < 1
    assert step["token_accuracy"] != held_out["validation_token_accuracy"]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_first_of_equal_logits_counts(num_ranks: int) -> None:
    logits, targets = ties()
    is_target = targets != -100
    expected = float(((logits.argmax(1) == targets) & is_target).sum() / is_target.sum())
    found = run_ranks(accuracy_of_ties, num_ranks, Layout(tp=num_ranks))
    assert found == pytest.approx([expected] * num_ranks, rel=1e-6)


def ties() -> tuple[Tensor, Tensor]:
    """Return logits of which several are largest, and targets that often are one of those."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (400, 8), generator=generator).bfloat16()
    targets = torch.randint(0, 8, (400,), generator=generator)
    targets[::7] = -100
    return logits, targets


def accuracy_of_ties(layout: Layout) -> float:
    meshes = build_meshes(layout, "cpu")
    logits, targets = ties()
    accuracy = TokenAccuracy(meshes)
    for rows in (slice(0, 150), slice(150, 400)):
        accuracy.count(logits[rows].chunk(layout.tp, 1)[meshes.rank("tp")], targets[rows])
    return accuracy.share()


def test_each_step_counts_anew_and_other_replicas_count_too() -> None:
    (found,) = run_ranks(accuracies_of_one_logit, 1)
    assert math.isnan(found[0])
    assert found[1:] == [1.0, 0.25]


def accuracies_of_one_logit() -> list[float]:
    accuracy, logits = TokenAccuracy(build_meshes(Layout(), "cpu")), torch.tensor([[0.0, 1.0]])
    without_target = accuracy.share()
    accuracy.count(logits, torch.tensor([0]))
    accuracy.begin()
    accuracy.count(logits, torch.tensor([1]))
    return [without_target, accuracy.share(), accuracy.share(lambda totals: totals.add_(torch.tensor([0.0, 3.0])))]
