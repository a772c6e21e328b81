"""The loss and the gradients of TRL's SFTTrainer, of the same random Llama on the same conversations.

Skipped where trl is not installed: it brings its own dependencies, and no other test needs it (measured with 1.16.0).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from chat_tokenizer import CHATML, write_chat_tokenizer
from meshwright.checkpoint.hf.maps.llama import FEED_FORWARD, GROUPED_ATTENTION, SHARED_BY_ALL
from meshwright.prover.differences import Record
from meshwright.prover.record import record
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CHATS = [
    ["hello there", "hello, what is your name?", "user", "there is a name: é"],
    ["what is this", "a test"],
    ["hello", "there"],
    ["is it?", "it is, it is, it is.", "so", "what"],
]


def conversations() -> list[list[dict[str, str]]]:
    roles = ("user", "assistant")
    return [[{"role": roles[n % 2], "content": text} for n, text in enumerate(chat)] for chat in CHATS]


def job_of(folder: Path) -> dict[str, Any]:
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations()))
    data = {"source": str(file), "tokenizer": str(folder), "cache_dir": str(folder / "cache")}
    return {
        "model": {"source": str(folder / "config.json"), "initial_weights": str(folder)},
        "data": {**data, "packing": "whole", "mask_documents": True, "validation_fraction": 0.0},
        "train": {"task": "sft", "seq_len": 128, "global_batch_size": 2, "steps": 1},
        "run": {"device": "cpu"},
    }


def ours(folder: Path) -> Record:
    (found,) = run_ranks(record_job, 1, job_of(folder))
    return found


def accuracy_of_a_step(job: dict[str, Any]) -> float:
    training = Training.build(Job.from_dict(job), Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    result = training.step(1, training.loader.microbatches(0))
    training.loader.close()
    return result.loss_metrics["token_accuracy"]


def record_job(job: dict[str, Any]) -> Record:
    return record(Job.from_dict(job), "cpu", None, False)[0]


def theirs(folder: Path, batch_size: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the log and the gradients of SFTTrainer's first step, with one conversation a row."""
    import transformers  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    gradients: dict[str, torch.Tensor] = {}

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    config = SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=True,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=len(CHATS) // batch_size,
        max_steps=1,
        max_grad_norm=0.0,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([{"messages": one} for one in conversations()]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        callbacks=[Watch()],
    )
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    return row, gradients


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return write_chat_tokenizer(tmp_path / "model", CHATML)


def write_model(folder: Path, *, ties: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=336, intermediate_size=48, tie_word_embeddings=ties, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_token_accuracy_is_that_of_trl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A model with a tied embedding mostly repeats its input, so that some targets are right.
    monkeypatch.setattr(f"{__name__}.CHATS", [[*chat[:-1], "aaabbbcc hello"] for chat in CHATS])
    write_model(folder, ties=True)
    (found,) = run_ranks(accuracy_of_a_step, 1, job_of(folder))
    row, _ = theirs(folder, len(CHATS))
    assert found == pytest.approx(row["mean_token_accuracy"], rel=1e-6)
    assert 0.02 < found < 0.98


@pytest.mark.parametrize("batch_size", [4, 2])
def test_loss_and_gradients_are_those_of_trl(batch_size: int, folder: Path) -> None:
    write_model(folder, ties=False)
    found = ours(folder)
    row, expected = theirs(folder, batch_size)
    assert found.losses[0] == pytest.approx(row["loss"], rel=1e-5)
    largest = max(float(one.abs().max()) for one in expected.values())
    names = {row.ours: row.theirs for row in (*SHARED_BY_ALL, *GROUPED_ATTENTION, *FEED_FORWARD)}
    pairs = [(ours.format(i=i), theirs.format(i=i)) for ours, theirs in names.items() for i in range(2)]
    compared = {ours: theirs for ours, theirs in pairs if ours in found.gradients[0]}
    assert compared.keys() == found.gradients[0].keys()
    assert set(compared.values()) == expected.keys()
    for ours_name, theirs_name in compared.items():
        difference = torch.from_numpy(found.gradients[0][ours_name].values) - expected[theirs_name]
        assert float(difference.abs().max()) < 1e-5 * largest, ours_name
