"""The loss, rewards and gradients of TRL's DPOTrainer, of the same random Llama on the same pairs.

Skipped where trl, or peft for the adapter, is not installed (measured with trl 1.16.0, peft 0.21.2).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from chat_tokenizer import CHATML, write_chat_tokenizer
from meshwright.checkpoint.hf.maps.llama import FEED_FORWARD, GROUPED_ATTENTION, SHARED_BY_ALL
from meshwright.data.dataset import build_dataset
from meshwright.data.packing.pair_dataset import PairDataset
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.score_pairs import score_pairs
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CHATS = [
    ("what is this", "a test", "is it?"),
    ("hello there", "hello, what is your name?", "so"),
    ("is there a name", "there is: é", "what, name is what?"),
    ("hello", "there", "user assistant"),
]
NAMES = {row.ours: row.theirs for row in (*SHARED_BY_ALL, *GROUPED_ATTENTION, *FEED_FORWARD)}


def pairs() -> list[dict[str, Any]]:
    def message(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    return [
        {"prompt": message("user", asked), "chosen": message("assistant", good), "rejected": message("assistant", bad)}
        for asked, good, bad in CHATS
    ]


def write_model(transformers: Any, folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=336, intermediate_size=48, tie_word_embeddings=False, **sizes)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that models differ in what they prefer
    model.save_pretrained(folder)
    return model


def job_of(folder: Path, weights: Path, adapter: dict[str, Any]) -> dict[str, Any]:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in pairs()))
    data = {"source": str(file), "tokenizer": str(folder), "cache_dir": str(folder / "cache")}
    return {
        "model": {"source": str(weights / "config.json"), "initial_weights": str(weights)},
        "adapter": adapter,
        "data": {**data, "packing": "whole", "mask_documents": True, "validation_fraction": 0.0},
        "train": {"task": "dpo", "seq_len": 160, "global_batch_size": 1, "steps": 1},
        "optimizer": {"max_grad_norm": 0.0},
        "run": {"device": "cpu"},
    }


def ours(job: dict[str, Any], reference: dict[str, Any]) -> tuple[float, dict[str, float], dict[str, np.ndarray]]:
    """Return loss, rewards and gradients of a step, with the reference that another job starts from."""
    ranks, parsed = Ranks(dist.get_rank(), 1, torch.device("cpu")), Job.from_dict(job)
    start = Training.build(Job.from_dict(reference), ranks)
    scores = score_pairs(start)
    start.loader.close()
    dataset = build_dataset(parsed.data, parsed.train.seq_len, "dpo")
    assert isinstance(dataset, PairDataset)
    assert dataset.num_training_samples == 1
    training, gradients = Training.build(parsed, ranks, dataset), {}
    training.step.reference = scores

    def keep(model: torch.nn.Module) -> None:
        named = ((name, one.grad) for name, one in canonical_parameters(model) if one.grad is not None)
        gradients.update({name: local_box(gradient)[0].numpy().copy() for name, gradient in named})

    training.step.observe_gradients = keep
    result = training.step(1, training.loader.microbatches(0))
    training.loader.close()
    return result.loss, result.loss_metrics, gradients


def theirs(
    folder: Path, model: Any, ref_model: Any, batch_size: int, **options: Any
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the log and the gradients of DPOTrainer's first step; `options` are of DPOConfig."""
    import transformers  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from trl import DPOConfig, DPOTrainer  # noqa: PLC0415

    gradients: dict[str, np.ndarray] = {}

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            found = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
            gradients.update(found)

    config = DPOConfig(
        output_dir=str(folder / "trl"),
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
        **options,
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=ref_model,
        args=config,
        train_dataset=Dataset.from_list(pairs()),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        callbacks=[Watch()],
    )
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    return row, gradients


def require_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], names: dict[str, str]) -> None:
    assert {names[name] for name in found} == expected.keys()
    largest = max(float(np.abs(one).max()) for one in expected.values())
    for name, gradient in found.items():
        assert np.abs(gradient - expected[names[name]]).max() < 1e-5 * largest, name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return write_chat_tokenizer(tmp_path / "model", CHATML)


LOSSES: list[tuple[int, dict[str, Any]]] = [
    (4, {}),
    (2, {}),
    (4, {"loss": "ipo"}),
    (2, {"loss": "ipo", "beta": 0.3}),
    (4, {"loss": "hinge"}),
    (4, {"loss": "robust", "label_smoothing": 0.2}),
]
"""Pairs of TRL's microbatches, and keys of [dpo]. The sigmoid loss of TRL 1.16 has no smoothing."""


@pytest.mark.parametrize(("batch_size", "dpo"), LOSSES, ids=str)
def test_loss_rewards_and_gradients_are_those_of_trl(batch_size: int, dpo: dict[str, Any], folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    other = folder.parent / "reference"
    model, ref_model = write_model(transformers, folder, 0), write_model(transformers, other, 1)
    jobs = ({**job_of(folder, weights, {}), "dpo": dpo} for weights in (folder, other))
    ((loss, rewards, gradients),) = run_ranks(ours, 1, *jobs)
    options = {"loss_type" if key == "loss" else key: value for key, value in dpo.items()}
    row, expected = theirs(folder, model, ref_model, batch_size, **options)
    assert loss == pytest.approx(row["loss"], rel=1e-5)
    assert abs(loss - np.log(2)) > 0.01
    given = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
    for name, trl_name in given.items():
        assert rewards[f"rewards/{name}"] == pytest.approx(row[f"rewards/{trl_name}"], abs=2e-4), name
    require_equal(gradients, expected, {a.format(i=i): b.format(i=i) for a, b in NAMES.items() for i in range(2)})


def test_gradients_of_an_adapter_are_those_of_trl(folder: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft", reason="needs PEFT")
    model = write_model(transformers, folder, 0)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    adapted.save_pretrained(folder / "adapter")
    adapter = {"kind": "lora", "rank": 4, "alpha": 8.0, "initial": str(folder / "adapter")}
    job = job_of(folder, folder, adapter)
    ((loss, _, gradients),) = run_ranks(ours, 1, job, job)
    row, expected = theirs(folder, adapted, None, 4)
    # Both start from their references.
    assert loss == pytest.approx(np.log(2), rel=1e-6)
    assert row["loss"] == pytest.approx(np.log(2), rel=1e-4)
    names = {}
    for ours_name, their_name in NAMES.items():
        for i in range(2):
            layer, module = (one.format(i=i).removesuffix(".weight") for one in (ours_name, their_name))
            for part, theirs_part in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
                names[f"{layer}.{part}"] = f"base_model.model.{module}.{theirs_part}.default.weight"
    require_equal(gradients, expected, names)
