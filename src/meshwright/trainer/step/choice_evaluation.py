"""ChoiceEvaluation: accuracy on multiple-choice questions while a model trains, on any layout.

Each choice is a row of train.seq_len positions, filled up after its last token, whose targets outside of the choice are
ignored: the sum of its next-token losses is minus the log-likelihood. Rows have the shape of training's, so that
nothing is compiled again and every layout can split them; data-parallel ranks share them.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.data.loader import Microbatch
from meshwright.data.questions.continuation import Continuation, cut_note
from meshwright.data.questions.load_questions import load_questions
from meshwright.data.questions.question_set import Mean, QuestionSet
from meshwright.errors import ConfigError
from meshwright.parallelism.losses.loss import NextTokenLoss
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.trainer.step.train_step import TrainStep
from meshwright.units import counted

_IGNORED = -100


class ChoiceEvaluation:
    """The questions of evaluation.source, and this rank's rows of their choices."""

    def __init__(self, step: TrainStep, questions: QuestionSet) -> None:
        self._step, self._questions = step, questions
        layout, num_rows = step.meshes.layout, len(questions.continuations)
        # All ranks run as many microbatches, the last of which may hold rows without targets.
        self._num_microbatches = -(-num_rows // (layout.dp * layout.microbatch_size))
        self._first = step.meshes.dp_rank * self._num_microbatches * layout.microbatch_size
        self._microbatches = self._own_microbatches()

    @classmethod
    def of(cls, step: TrainStep) -> Self | None:
        """Return that of the step's job, None if it asks no questions; raises DataError, ConfigError for a bad file."""
        job = step.job
        if job.evaluation.source is None:
            return None
        if not isinstance(step.pipeline.loss, NextTokenLoss):
            raise ConfigError(
                "evaluation.source asks for log-likelihoods of text, which follow from the next-token loss, and "
                f"model.source = {job.model.source!r} has a loss of its own: remove that method, or evaluation.source"
            )
        architecture = resolve_architecture(job.model)
        vocab_size = None if architecture is None else architecture.vocab_size
        return cls(step, load_questions(job.evaluation, job.data.tokenizer, job.train.seq_len, vocab_size))

    def __str__(self) -> str:
        section, interval = self._step.job.evaluation, self._step.job.evaluation.interval
        when = f"every {counted(interval, 'step')} and at the end" if interval else "at the end"
        num_questions = counted(len(self._questions.questions), "question")
        return f"{num_questions} of {section.source} {when}{cut_note(self._questions.continuations)}"

    def is_due(self, step: int) -> bool:
        """Return whether questions are asked after `step`: at each interval, and after the last of all."""
        interval = self._step.job.evaluation.interval
        return step == self._step.job.train.steps or (interval > 0 and step % interval == 0)

    def __call__(self) -> dict[str, Mean]:
        """Return acc, acc_norm and acc_bytes of the model as it is; a collective."""
        return self._questions.accuracies(self.log_likelihoods())

    def log_likelihoods(self) -> list[float]:
        """Return that of each choice of the first question, then of the second one, ...; a collective."""
        layout, device = self._step.meshes.layout, self._step.meshes.device_type
        num_own = self._num_microbatches * layout.microbatch_size
        losses_R = torch.zeros(layout.dp * num_own, dtype=torch.float64, device=device)
        losses_R[self._first : self._first + num_own] = self._step.row_losses(self._microbatches).flatten()
        dist.all_reduce(losses_R)
        return (-losses_R).tolist()[: len(self._questions.continuations)]

    def _own_microbatches(self) -> list[Microbatch]:
        job, size = self._step.job, self._step.meshes.layout.microbatch_size
        microbatches = []
        for index in range(self._num_microbatches):
            first = self._first + index * size
            inputs_BS, targets_BS = rows_of(
                self._questions.continuations[first : first + size], size, job.train.seq_len
            )
            documents_BS = torch.zeros_like(inputs_BS) if job.data.mask_documents else None
            microbatches.append(Microbatch(inputs_BS, targets_BS, first, documents_BS))
        return microbatches


def rows_of(continuations: Sequence[Continuation], num_rows: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return (inputs_BS, targets_BS) of `num_rows` rows; further ones and what is not scored have no targets."""
    inputs_BS = torch.zeros(num_rows, seq_len, dtype=torch.int64)
    targets_BS = torch.full((num_rows, seq_len), _IGNORED)
    for row, one in enumerate(continuations):
        length = len(one.inputs)
        inputs_BS[row, :length] = torch.tensor(one.inputs)
        targets_BS[row, length - len(one.targets) : length] = torch.tensor(one.targets)
    return inputs_BS, targets_BS
