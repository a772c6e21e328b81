"""What a run says of itself before its first step: its size, layout and batch, and what has no effect here."""

import logging

import torch

from meshwright.log import logger
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.model.gpt2_architecture import dropout_note
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.trainer.step.training import Training
from meshwright.units import counted


def announce(training: Training, step: int, peak_name: str | None) -> None:
    """Log the size, the layout and the batch of the run, and the FLOP/s that its MFU refers to."""
    if (note := dropout_note(resolve_architecture(training.job.model))) is not None:
        logger.warning("%s", note)
    ranks, layout, replicas = training.ranks, training.layout, training.replicas
    num_microbatches = training.job.num_microbatches(layout)
    tokens = f" of {counted(training.job.train.seq_len, 'token')}" if training.dataset.vocab_size else ""
    logger.info(
        "%s parameters on %d %s rank%s%s (%s), %s of %s%s each%s, from step %d",
        f"{training.num_parameters:,}",
        ranks.num_ranks,
        ranks.device.type,
        "" if ranks.num_ranks == 1 else "s",
        "" if replicas is None else f" in each of {counted(replicas.num_members, 'replica')}",
        layout_text(layout),
        counted(num_microbatches, "microbatch", "microbatches"),
        counted(layout.microbatch_size, "sample"),
        tokens,
        "" if replicas is None or replicas.num_members == 1 else ", shared by all",
        step,
    )
    for note in training.dataset.notes:
        logger.info("%s", note)
    for line in training.dataset.left_out:
        logger.warning("%s", line)
    if (float8 := training.model.float8) is not None:
        logger.log(logging.WARNING if float8.is_fallback else logging.INFO, "%s", float8.text)
    if training.job.train.exact_elastic:
        logger.info(
            "exact sums: the same bits on any number of data-parallel ranks with as many threads each (%d here)",
            torch.get_num_threads(),
        )
    if training.model.pools is not None:
        for note in training.model.pools.notes():
            logger.info("%s", note)
    if layout.activation_offload and ranks.device.type == "cpu":
        logger.warning("layout.activation_offload saves nothing on a CPU: activations are copied within its own memory")
    if layout.cuda_graphs and ranks.device.type == "cpu":
        logger.warning("layout.cuda_graphs has no effect on a CPU: there are no kernel launches to save")
    if layout.communication_sms is not None and ranks.device.type == "cpu":
        logger.warning("layout.communication_sms has no effect on a CPU: gloo runs no kernels that take SMs")
    if peak_name is not None:
        logger.info("MFU is of %s for each rank", peak_name)
    if step >= training.job.train.steps:
        logger.info("the run has %d steps and train.steps = %d: nothing to train", step, training.job.train.steps)
