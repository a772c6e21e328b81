"""Sharded parameters come together on rank 0, and one hash stands for them, whatever the layout."""

import pytest
import torch
import xxhash
from torch import distributed as dist

import hand_made
from meshwright.parallelism.data.parameter_hash import parameter_hash, whole_tensors
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks

LAYOUTS = [
    Layout(),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, tp=2),
    Layout(dp_shard=2, tp=2, ep=4),
    Layout(pp=2, dp_shard=2),
    Layout(pp=2, tp=2, ep=2, schedule="ZBVZeroBubble"),
    Layout(pp=2, dp_shard=2, tp=2, ep=2),
    Layout(dp_shard=4, tp=2, ep=2, etp=1),
]


def put_together(layout: Layout) -> tuple[list[str], str]:
    model, _ = hand_made.build(layout)
    names = []
    for name, whole in whole_tensors(canonical_parameters(model)):
        assert torch.equal(whole, hand_made.all_values()[name]), name
        names.append(name)
    return names, parameter_hash(model)


def expected_hash() -> str:
    digest = xxhash.xxh3_128()
    for name, value in sorted(hand_made.all_values().items()):
        digest.update(f"{name} {tuple(value.shape)} torch.float32".encode() + value.numpy().tobytes())
    return digest.hexdigest()


def bytes_sent(layout: Layout) -> int:
    model, _ = hand_made.build(layout)
    sent, send = 0, dist.send

    def counted(tensor: torch.Tensor, dst: int) -> None:
        nonlocal sent
        sent += tensor.nbytes
        send(tensor, dst)

    dist.send = counted
    parameter_hash(model)
    return sent


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_same_parameters_and_the_same_hash(layout: Layout) -> None:
    (names, digest), *others = run_ranks(put_together, layout.num_ranks, layout)
    assert names == sorted(hand_made.all_values())
    assert others == [([], "")] * len(others)
    assert digest == expected_hash()


def test_copies_do_not_travel() -> None:
    total = sum(value.nbytes for value in hand_made.all_values().values())
    assert run_ranks(bytes_sent, 4, Layout(dp_replicate=4)) == [0] * 4
    assert sum(run_ranks(bytes_sent, 4, Layout(dp_replicate=2, dp_shard=2))) <= total / 2
