"""score_pairs: the log-probabilities that a model gives all answers of a dataset of pairs."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.data.loader import Microbatch
from meshwright.data.packing.pair_dataset import NO_PAIR
from meshwright.parallelism.data.fully_sharded import reshard_model
from meshwright.parallelism.losses.preference_loss import Pairs, PreferenceLoss
from meshwright.trainer.step.training import Training


class _KeptScores:
    """Callable in place of a loss: keeps the scores of each microbatch."""

    def __init__(self, loss: PreferenceLoss) -> None:
        self._scores, self.kept = loss.scores, list[Tensor]()

    def __call__(self, output: Tensor, targets_BS: Tensor, pairs: Pairs) -> Tensor:
        """Return 0."""
        self.kept.append(self._scores(output, targets_BS, pairs))
        return torch.zeros((), device=targets_BS.device)


@torch.no_grad()
def score_pairs(training: Training, show: Callable[[int], None] = lambda _: None) -> Tensor:
    """Return what the model, as it is now and without dropout, gives each pair: float64 [pairs, 2]; a collective.

    Data-parallel ranks share the rows. `show` gets the number of rows scored so far.
    """
    dataset, layout = training.dataset, training.layout
    assert dataset.num_pairs
    # As many microbatches at a time as keep all stages busy.
    shape = (layout.pp, layout.microbatch_size)
    num_rows = layout.pp * layout.microbatch_size
    found = torch.zeros(dataset.num_pairs, 2, dtype=torch.float64)
    training.model.eval()
    for first in range(0, dataset.num_samples, layout.dp * num_rows):
        # Rows after the last are padding.
        rows = first + training.meshes.dp_rank * num_rows + np.arange(num_rows)
        _score(training, training.loader.microbatches_of(rows.reshape(shape)), found)
        show(min(dataset.num_samples, first + layout.dp * num_rows))
    training.model.train()
    reshard_model(training.model)
    return _of_all_ranks(found, training)


def _score(training: Training, batch: Sequence[Microbatch], found: Tensor) -> None:
    """Write the scores of the pairs in a batch into `found`, on ranks of the last stage; a collective."""
    pipeline, loss = training.step.pipeline, training.step.pipeline.loss
    assert isinstance(loss, PreferenceLoss)
    pipeline.loss = keeper = _KeptScores(loss)
    try:
        pipeline.evaluate(training.step.evaluated_inputs(batch))
    finally:
        pipeline.loss = loss
    for microbatch, scores_BP2 in zip(batch if keeper.kept else (), keeper.kept, strict=True):
        assert microbatch.pairs is not None
        is_pair_BP = microbatch.pairs != NO_PAIR
        found[microbatch.pairs[is_pair_BP]] = scores_BP2.cpu()[is_pair_BP]


def _of_all_ranks(found: Tensor, training: Training) -> Tensor:
    """Return what the ranks of the last stage have found, each the pairs of its rows; a collective."""
    total = found.to(training.ranks.device)
    if training.meshes.rank("tp") or training.meshes.rank("cp"):
        total.zero_()  # they have the same scores as the first of them
    dist.all_reduce(total)
    return total.cpu()
