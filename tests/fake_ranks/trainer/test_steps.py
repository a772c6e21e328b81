"""A step of the real trainer runs on any of hundreds of ranks. Nobody answers: shapes, peers and order are tested."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.errors import NonFiniteError
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.prover.proof_data import write_corpus
from meshwright.prover.small_job import small_job
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training

NUM_RANKS = 512


@pytest.mark.parametrize(
    "words",
    [
        "dp_replicate=2,dp_shard=8,cp=2,tp=4,pp=4",
        "dp_shard=4,cp=4,tp=4,pp=8,cp_method=ring,schedule=Interleaved1F1B,activation_checkpoint=full",
        "dp_shard=8,cp=4,tp=4,pp=4,cp_method=ulysses,schedule=ZBVZeroBubble,reshard_after_forward=never",
    ],
)
def test_a_step_runs_on_any_rank(fake_rank: int, words: str, tmp_path: Path) -> None:
    layout = parse_layout(words)
    assert layout.num_ranks == NUM_RANKS
    write_corpus(tmp_path / "corpus.jsonl")
    job = Job(model=ModelSection(source="llama3-8b"))
    small = small_job(job, [layout], tmp_path / "corpus.jsonl", num_steps=1, precision="float32").with_layout(layout)
    training = Training.build(small, Ranks(fake_rank, NUM_RANKS, torch.device("cpu")))
    reached = []
    training.step.observe_gradients = lambda model: reached.extend(_with_gradients(model))
    # What nobody sent can be any number, and the step says so after everything else.
    with contextlib.suppress(NonFiniteError):
        training.step(1, training.loader.microbatches(0))
    training.loader.close()
    assert reached == [name for name, _ in canonical_parameters(training.model)]
    assert reached


def _with_gradients(model: nn.Module) -> list[str]:
    return [name for name, parameter in canonical_parameters(model) if parameter.grad is not None]
