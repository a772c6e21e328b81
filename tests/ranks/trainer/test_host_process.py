"""Ranks on a processor multiply by the library that doctor names."""

import torch

from meshwright.trainer.launch.host_process import takes_onednn
from run_ranks import run_ranks


def calls_onednn() -> bool:
    """Return whether a matmul of this rank calls oneDNN."""
    matrix = torch.randn(256, 256)
    with torch.profiler.profile() as profile:
        matrix @ matrix
    return any(event.name.startswith("mkldnn::") for event in profile.events())


def test_ranks_take_onednn_where_it_is_faster() -> None:
    assert run_ranks(calls_onednn, 2) == [takes_onednn()] * 2
