"""What a block saves leaves the device after the next block's forward, and is back before its backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import UnsupportedError
from meshwright.parallelism.activation_offload import HostTransfers, offload_blocks
from meshwright.parallelism.saved_tensors import SMALLEST_BYTES, BlockActivations, SavedStorage

WIDTH, ROWS = 64, 128
ROW_BYTES = 4 * WIDTH
SAVED_BYTES = ROWS * ROW_BYTES


class Block(nn.Module):
    """Saves its input twice, once as a view, the output of its matmul, and `shared`; calls `watch` when it runs."""

    def __init__(self, watch: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self._watch = nn.Linear(WIDTH, WIDTH), watch

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        self._watch()
        out: Tensor = self.linear(x).sigmoid() * x.view(-1, WIDTH) * shared
        return out


def _on_device() -> int:
    """Return the bytes of saved storages that are on the device now."""
    # Not isinstance, which asks a weak proxy for its class: another test's may be dead.
    storages = [one for one in gc.get_objects() if type(one) is SavedStorage]
    return sum(one.on_device.nbytes for one in storages if one.on_device is not None)


def _blocks(number: int, watch: Callable[[], Any] = lambda: None) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(watch) for _ in range(number))


def _run(blocks: nn.ModuleList, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, shared = torch.randn(rows, WIDTH, requires_grad=True), torch.randn(rows, WIDTH)
    out = x
    for block in blocks:
        out = block(out, shared)
    return x, out.sum()


def test_each_storage_is_moved_once_and_what_blocks_share_or_hold_not_at_all() -> None:
    blocks, transfers = _blocks(3), HostTransfers(torch.device("cpu"))
    offload_blocks(blocks, transfers, has_last=True)
    _run(blocks)
    # Of each block but the last: its input, of which it also saves a view, and the output of sigmoid.
    assert transfers.moved_bytes == 2 * 2 * SAVED_BYTES


def test_gradients_are_those_without_offload() -> None:
    plain, moved = _blocks(4), _blocks(4)
    offload_blocks(moved, HostTransfers(torch.device("cpu")), has_last=False)
    gradients = []
    for blocks in (plain, moved):
        x, loss = _run(blocks)
        loss.backward()
        gradients.append([x.grad, *(one.grad for one in blocks.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_the_device_holds_what_two_blocks_saved_at_most() -> None:
    held: list[int] = []
    blocks = _blocks(6, lambda: held.append(_on_device()))
    offload_blocks(blocks, HostTransfers(torch.device("cpu")), has_last=True)
    _, loss = _run(blocks)
    # While a block runs, what the one before it saved is on its way.
    assert max(held) == 2 * SAVED_BYTES
    assert _on_device() == 0
    of_backward: list[int] = []
    for parameter in blocks.parameters():
        parameter.register_hook(lambda _: of_backward.append(_on_device()))
    loss.backward()
    assert 0 < max(of_backward) <= 2 * 2 * SAVED_BYTES
    assert _on_device() == 0


def test_a_graph_that_is_kept_is_read_again_from_the_host() -> None:
    blocks = _blocks(3)
    offload_blocks(blocks, HostTransfers(torch.device("cpu")), has_last=False)
    x, loss = _run(blocks)
    (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
    (second,) = torch.autograd.grad(loss, [x])
    assert torch.equal(first, second)


def test_what_is_read_next_goes_back_through_the_blocks_and_then_forth() -> None:
    made: list[BlockActivations] = []
    for _ in range(3):
        made.append(BlockActivations(made[-1] if made else None, set(), lambda _: None, stays=False))
    first, second, third = made
    assert [one.read_next() for one in (third, second, first)] == [second, first, None]
    assert [one.read_next() for one in (first, second, third)] == [second, third, None]


def test_small_storages_stay() -> None:
    blocks, transfers = _blocks(3), HostTransfers(torch.device("cpu"))
    offload_blocks(blocks, transfers, has_last=False)
    _run(blocks, rows=SMALLEST_BYTES // ROW_BYTES - 1)
    assert transfers.moved_bytes == 0


def test_without_gradients_nothing_is_moved() -> None:
    blocks, transfers = _blocks(2), HostTransfers(torch.device("cpu"))
    offload_blocks(blocks, transfers, has_last=False)
    with torch.no_grad():
        _run(blocks)
    assert transfers.moved_bytes == 0


def test_a_saved_tensor_that_is_changed_in_place_is_refused() -> None:
    blocks = _blocks(2)
    offload_blocks(blocks, HostTransfers(torch.device("cpu")), has_last=False)
    shared = torch.randn(ROWS, WIDTH)
    x = torch.randn(ROWS, WIDTH)
    out = blocks[0](x, shared)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(UnsupportedError, match=r"shape \(8192,\) that a block saved for backward was changed in place"):
        blocks[1](out, shared)


@pytest.mark.parametrize(("rows", "has_last"), [(8, False), (ROWS, True)])
def test_a_tensor_that_stays_and_is_changed_in_place_is_refused(rows: int, has_last: bool) -> None:
    # Those of few bytes stay on the device, and those of the last block: autograd looks at none of them.
    blocks = _blocks(1)
    offload_blocks(blocks, HostTransfers(torch.device("cpu")), has_last=has_last)
    x = torch.randn(rows, WIDTH)
    out = blocks[0](x, torch.randn(rows, WIDTH))
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(UnsupportedError, match="changed in place afterwards"):
        out.sum().backward()
