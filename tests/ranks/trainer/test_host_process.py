"""Ranks on a processor multiply by the library that doctor names, and take memory by large pages."""

import resource
from pathlib import Path

import pytest
import torch

from meshwright.trainer.launch.host_process import takes_onednn
from run_ranks import run_ranks

_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def calls_onednn() -> bool:
    """Return whether a matmul of this rank calls oneDNN."""
    matrix = torch.randn(256, 256)
    with torch.profiler.profile() as profile:
        matrix @ matrix
    return any(event.name.startswith("mkldnn::") for event in profile.events())


def page_faults() -> int:
    """Return the page faults of a first tensor of 64 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_ranks_take_onednn_where_it_is_faster() -> None:
    assert run_ranks(calls_onednn, 2) == [takes_onednn()] * 2


@pytest.mark.skipif(
    not _LARGE_PAGES.exists() or "[never]" in _LARGE_PAGES.read_text(), reason="this system gives no large pages"
)
def test_ranks_take_memory_by_large_pages() -> None:
    # By pages of 4 KiB it takes 16,384. Of large ones the system may have none left for a part.
    assert run_ranks(page_faults, 1)[0] < 8_192
