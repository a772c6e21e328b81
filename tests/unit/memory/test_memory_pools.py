"""Pools by device: none on a CPU, one sentence why not where a device lacks them, and marks that a trace reads."""

import gc
from typing import Any

import pytest
import torch

from meshwright.errors import UnsupportedError
from meshwright.memory import capabilities, managed_pool
from meshwright.memory.managed_pool import ManagedPool
from meshwright.memory.managed_tensors import is_managed, managed_bytes
from meshwright.memory.memory_pools import memory_pools
from meshwright.spec.job.memory_section import MemorySection

ALL = MemorySection(embedding="uvm", optimizer_state="uvm", communication="nccl")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_cpu_has_no_pools_and_one_sentence_for_each_key() -> None:
    pools = memory_pools(ALL, CPU)
    assert (pools.embedding, pools.optimizer_state, pools.communication) == (None, None, "device")
    notes = list(pools.notes())
    assert len(notes) == 3
    assert all(note.endswith("has no effect on a CPU, which has one memory") for note in notes)
    assert not list(memory_pools(MemorySection(), CPU).notes())


@pytest.mark.parametrize("key", ["embedding", "optimizer_state"])
def test_a_device_without_concurrent_access_is_refused_by_name(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "device_attribute", lambda *_: 0)
    with pytest.raises(UnsupportedError, match=f"memory.{key} .*no concurrent managed access.*set memory.{key}"):
        memory_pools(MemorySection.from_dict({key: "uvm"}), CUDA)


def test_a_build_without_nccl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r'memory.communication = "nccl".*no NCCL.*set memory.communication'):
        memory_pools(MemorySection(communication="nccl"), CUDA)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.memory.cuda_driver.LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(UnsupportedError, match=r"no-such-driver.*install the driver, or leave"):
        memory_pools(MemorySection(embedding="uvm"), CUDA)


def test_a_pool_copies_values_and_marks_what_it_made() -> None:
    pool, tensor = ManagedPool(CPU), torch.arange(6.0).view(2, 3)
    moved = pool.move(tensor)
    assert torch.equal(moved, tensor)
    assert moved.data_ptr() != tensor.data_ptr()
    assert is_managed(moved)
    assert is_managed(moved[0])
    assert not is_managed(tensor)
    assert managed_bytes([tensor, moved]) == pool.num_bytes == 24


def test_a_mark_ends_with_its_storage() -> None:
    moved = ManagedPool(CPU).move(torch.ones(4))
    del moved
    gc.collect()
    assert managed_bytes([torch.ones(4)]) == 0


class _Block:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.address = num_bytes, 1 << 20


def test_tensors_share_blocks_and_start_at_multiples_of_512(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[_Block] = []
    spans: list[Any] = []

    def allocate(num_bytes: int) -> _Block:
        blocks.append(_Block(num_bytes))
        return blocks[-1]

    def as_tensor(span: Any, device: torch.device) -> torch.Tensor:
        spans.append(span.__cuda_array_interface__)
        return torch.zeros(span.__cuda_array_interface__["shape"], dtype=torch.uint8)

    monkeypatch.setattr(managed_pool.torch, "as_tensor", as_tensor)
    pool = ManagedPool(CUDA, allocate)
    sizes = (3, 1000, 9 << 20, 1)
    made = [pool.empty_like(torch.ones(size)) for size in sizes]
    assert [one.dtype for one in made] == [torch.float32] * 4
    assert [one.shape[0] for one in made] == list(sizes)
    # The third is larger than a block.
    assert [block.num_bytes for block in blocks] == [32 << 20, 36 << 20, 32 << 20]
    assert [span["data"][0] - (1 << 20) for span in spans] == [0, 512, 0, 0]
    assert pool.num_bytes == 4 * sum(sizes)


def test_a_device_without_multicast_takes_no_buffers_from_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(capabilities, "device_attribute", lambda *_: 0)
    with pytest.raises(UnsupportedError, match="NCCL's allocator is not available: the device has no multicast"):
        memory_pools(MemorySection(communication="nccl"), CUDA)
    assert memory_pools(MemorySection(communication="symmetric"), CUDA).communication == "symmetric"
