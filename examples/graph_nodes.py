"""Bring your own data that is no text: a graph, whose nodes are classified from neighbourhoods that are sampled.

    meshwright train examples/graph_nodes.toml --ranks 2
    python examples/graph_nodes.py runs/graph_nodes     the accuracy on nodes that were not trained, by checkpoint

Shapes: B batch, K and L neighbours sampled of a node and of each of these, F features, D width.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.checkpoint.checkpoint import load_parameters

FANOUTS = (10, 5)


class Graph:
    """Nodes in communities: most edges stay within one, and features say little about it. Edges are in CSR form."""

    def __init__(self, num_nodes: int, num_communities: int = 8, num_features: int = 16, degree: int = 12) -> None:
        random = np.random.default_rng(0)
        self.labels = random.integers(num_communities, size=num_nodes)
        centres = random.standard_normal((num_communities, num_features))
        self.features = (0.4 * centres[self.labels] + random.standard_normal((num_nodes, num_features))).astype("f4")
        members = [np.flatnonzero(self.labels == label) for label in range(num_communities)]
        source = np.repeat(np.arange(num_nodes), degree // 2)
        inside = np.concatenate([random.choice(members[label], degree // 2) for label in self.labels])
        target = np.where(random.random(source.size) < 0.8, inside, random.integers(num_nodes, size=source.size))
        ends = np.concatenate([source, target])
        self.neighbours = np.concatenate([target, source])[np.argsort(ends, kind="stable")]
        self.starts = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=num_nodes))])

    def sample(self, nodes: np.ndarray, fanout: int, random: np.random.Generator) -> np.ndarray:
        """Return `fanout` neighbours of each node, drawn with replacement."""
        first, degree = self.starts[nodes], self.starts[nodes + 1] - self.starts[nodes]
        return self.neighbours[first[:, None] + (random.random((len(nodes), fanout)) * degree[:, None]).astype(int)]


class Neighbourhoods:
    """Sample i is draw i % draws of the neighbourhood of node i // draws, so that the last samples are other nodes."""

    def __init__(self, num_nodes: int = 4000, draws: int = 8) -> None:
        self.graph, self.num_nodes, self.draws = Graph(num_nodes), num_nodes, draws

    def __len__(self) -> int:
        return self.num_nodes * self.draws

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        # A function of the index, on any rank and in any worker; the fixed fanouts let samples be stacked.
        random, hops = np.random.default_rng(index), [np.array([index // self.draws])]
        for fanout in FANOUTS:
            hops.append(self.graph.sample(hops[-1], fanout, random).ravel())
        return self.graph.features[np.concatenate(hops)], int(self.graph.labels[index // self.draws])


class SageLayer(nn.Module):
    """A node's own features and the mean of its neighbours' (Hamilton, Ying and Leskovec, arXiv:1706.02216)."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(width_in, width), nn.Linear(width_in, width, bias=False)

    def forward(self, own: Tensor, neighbours: Tensor) -> Tensor:
        return F.relu(self.own(own) + self.neighbours(neighbours.mean(-2)))


class GraphSage(nn.Module):
    def __init__(self, num_features: int = 16, width: int = 64, num_classes: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SageLayer(num_features, width), SageLayer(width, width)])
        self.head = nn.Linear(width, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        near, far = FANOUTS
        node_BF, hop_BKF, far_BF = features.split([1, near, near * far], dim=1)
        node_BD = self.blocks[0](node_BF[:, 0], hop_BKF)
        hop_BKD = self.blocks[0](hop_BKF, far_BF.unflatten(1, (near, far)))
        return self.head(self.blocks[1](node_BD, hop_BKD))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


def main(run: Path) -> None:
    data, model = Neighbourhoods(), GraphSage()
    held_out = range(int(0.9 * len(data)), len(data), data.draws)  # one draw of each node
    features, labels = zip(*(data[index] for index in held_out), strict=True)
    for checkpoint in sorted(run.glob("checkpoints/step-*"), key=lambda folder: int(folder.name[5:])):
        model.load_state_dict(load_parameters(checkpoint))
        right = model(torch.tensor(np.stack(features))).argmax(1) == torch.tensor(labels)
        print(f"{checkpoint.name}: {right.float().mean():.1%} of {len(held_out)} nodes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
