"""A job to begin with for a model of a given size: what init writes.

Peak learning rates from 8B up are those of "The Llama 3 Herd of Models" (arXiv:2407.21783, table 3: 3e-4, 1.5e-4,
8e-5), a batch of 4M tokens is where its 405B run began (section 3.4.1); smaller sizes follow the same trend, higher for
smaller. They are places to start from, not tuned values.
"""

from dataclasses import dataclass

from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import (
    CheckpointSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    TrainSection,
)
from meshwright.spec.layout.layout import ActivationCheckpoint, LayoutRequest


@dataclass(frozen=True)
class _Size:
    max_parameters: float
    learning_rate: float
    seq_len: int
    global_batch_size: int
    steps: int
    warmup_steps: int
    checkpoint_interval: int
    activation_checkpoint: ActivationCheckpoint
    microbatch_size: int = 1
    is_for_gpus: bool = True


_SIZES = (
    # Minutes on a laptop: float32, because CPUs emulate bfloat16, and a step of a second or less.
    _Size(5e7, 3e-3, 256, 16, 200, 10, 50, "none", microbatch_size=2, is_for_gpus=False),
    _Size(2e9, 6e-4, 2048, 256, 20_000, 500, 500, "none"),
    _Size(2e10, 3e-4, 8192, 512, 100_000, 2000, 500, "selective"),
    _Size(2e11, 1.5e-4, 8192, 512, 100_000, 2000, 250, "full"),
    _Size(float("inf"), 8e-5, 8192, 512, 100_000, 8000, 250, "full"),
)


def starting_job(source: str, num_parameters: int, max_seq_len: int) -> Job:
    """Return a job for the model `source` with keys that suit its size; data-parallel over all ranks there are."""
    size = next(size for size in _SIZES if num_parameters <= size.max_parameters)
    return Job(
        model=ModelSection(source=source),
        train=TrainSection(
            steps=size.steps,
            seq_len=min(size.seq_len, max_seq_len),
            global_batch_size=size.global_batch_size,
            validation_interval=max(1, size.steps // 20),
        ),
        optimizer=OptimizerSection(learning_rate=size.learning_rate, warmup_steps=size.warmup_steps),
        precision=PrecisionSection(compute="bfloat16" if size.is_for_gpus else "float32"),
        layout=LayoutRequest(
            dp_shard=-1,
            microbatch_size=size.microbatch_size,
            activation_checkpoint=size.activation_checkpoint,
            compile=size.is_for_gpus,
        ),
        checkpoint=CheckpointSection(interval=size.checkpoint_interval),
    )
