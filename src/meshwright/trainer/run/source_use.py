"""What a run has read of each source of a mixture, for metrics and for the log: a function of the step alone."""

from collections.abc import Iterator

from meshwright.trainer.step.training import Training
from meshwright.units import format_count


def source_columns(training: Training, num_steps: int) -> dict[str, float]:
    """Return columns of metrics.jsonl after so many steps of data; none without a mixture."""
    columns: dict[str, float] = {}
    for use in training.loader.use(num_steps):
        columns[f"samples/{use.name}"] = use.num_samples
        if training.dataset.vocab_size is not None:
            columns[f"tokens/{use.name}"] = use.num_samples * training.job.train.seq_len
        columns[f"epochs/{use.name}"] = use.epochs
    return columns


def source_lines(training: Training, num_steps: int) -> Iterator[str]:
    """Yield a line for each source of a mixture."""
    uses = training.loader.use(num_steps)
    total = sum(use.num_samples for use in uses) or 1
    for use in uses:
        tokens = ""
        if training.dataset.vocab_size is not None:
            tokens = f", {format_count(use.num_samples * training.job.train.seq_len)} tokens"
        share = use.num_samples / total
        yield f"{use.name}: {use.num_samples} samples ({share:.1%}){tokens}, {use.epochs:.3g} epochs"
