"""score_pairs: the log-probabilities that a model gives all answers of a dataset of pairs."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.data.pair_dataset import PairDataset, Scores
from meshwright.parallelism.data.fully_sharded import reshard_model
from meshwright.parallelism.preference_loss import Pairs, PreferenceLoss
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
def score_pairs(training: Training, show: Callable[[int], None] = lambda _: None) -> Scores:
    """Return what the model, as it is now and without dropout, gives each pair: [pairs, 2] in float64; a collective.

    Data-parallel ranks share the rows. `show` is told of how many rows have been scored.
    """
    dataset, step, pipeline = training.dataset, training.step, training.step.pipeline
    assert isinstance(dataset, PairDataset)
    loss = pipeline.loss
    assert isinstance(loss, PreferenceLoss)
    layout, meshes = training.layout, training.meshes
    shape = (layout.pp, layout.microbatch_size)
    found = np.zeros((dataset.num_pairs, 2))
    training.model.eval()
    try:
        pipeline.loss = keeper = _KeptScores(loss)
        for first in range(0, dataset.num_rows, layout.dp * layout.pp * layout.microbatch_size):
            rows = first + meshes.dp_rank * layout.pp * layout.microbatch_size + np.arange(np.prod(shape))
            batch = training.loader.microbatches_of(rows.reshape(shape))
            pipeline.evaluate(step.evaluated_inputs(batch))
            for microbatch, scores in zip(rows.reshape(shape), keeper.kept, strict=False):
                for row, of_row in zip(microbatch, scores.cpu().numpy(), strict=True):
                    pairs = dataset.pairs_of(int(row))
                    found[pairs] = of_row[: len(pairs)]
            keeper.kept.clear()
            show(min(dataset.num_rows, first + layout.dp * layout.pp * layout.microbatch_size))
    finally:
        pipeline.loss = loss
        training.model.train()
    reshard_model(training.model)
    return _of_all_ranks(found, training)


def _of_all_ranks(found: Scores, training: Training) -> Scores:
    """Return what the ranks of the last stage have found, each the pairs of its rows; a collective."""
    meshes = training.meshes
    total = torch.from_numpy(found).to(training.ranks.device)
    if meshes.rank("tp") or meshes.rank("cp"):
        total.zero_()  # they have the same scores as the first of them
    dist.all_reduce(total)
    return total.cpu().numpy()
