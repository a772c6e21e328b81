"""One rank of Hugging Face's Trainer, with DDP if there are several.

python -m benchmarks.peers.ranks.hf_trainer_rank FOLDER [compiled] [float8=RECIPE]
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.ranks.tokens import all_rows
from benchmarks.peers.ranks.transformers_model import as_batch, load_model
from benchmarks.peers.turns import Turns, read_task


class _NextTurn(TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the turn: what the Trainer does until its next step belongs to this one."""
        self._turns.next()
        self._turns.loss = 0.0


class _WatchedTrainer(Trainer):
    turns: Turns

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return the loss of a microbatch, as its share of the step's, to which it is added."""
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.turns.loss = self.turns.loss + loss.detach()
        return loss


def main() -> None:
    """Train until no turn is left."""
    folder, is_compiled = Path(sys.argv[1]), "compiled" in sys.argv[2:]
    recipes = [text.removeprefix("float8=") for text in sys.argv[2:] if text.startswith("float8=")]
    task, turns = read_task(folder), Turns.of_environment()
    rows = [as_batch(row) for row in all_rows(folder)]
    model = load_model(folder)
    if recipes and recipes != ["none"]:
        convert_linears(model, *recipes)
    trainer = _WatchedTrainer(
        model=model,
        args=training_arguments(task, is_compiled=is_compiled, num_steps=task["num_steps"]),
        train_dataset=rows,
        callbacks=[_NextTurn(turns)],
    )
    trainer.turns = turns
    trainer.train()


def convert_linears(model: Any, recipe: str) -> None:
    """Let the blocks' linear layers compute in float8, as torchao's users do; the head stays as it is, like ours."""
    # Not at the top: only tasks in float8 need torchao.
    torchao = import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)


def training_arguments(task: dict[str, Any], *, is_compiled: bool, num_steps: int) -> TrainingArguments:
    """Return the settings of the task; all others are the Trainer's own, the log of every step among them."""
    return TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=task["microbatch_size"],
        gradient_accumulation_steps=task["num_microbatches"],
        max_steps=num_steps,
        # It would drop shift_labels, which forward takes by **kwargs, and targets would be shifted twice.
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        learning_rate=task["learning_rate"],
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        adam_epsilon=task["eps"],
        weight_decay=task["weight_decay"],
        max_grad_norm=task["max_grad_norm"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=task["device"] == "cpu",
        bf16=task["precision"] == "bfloat16",
        torch_compile=is_compiled,
    )


if __name__ == "__main__":
    main()
