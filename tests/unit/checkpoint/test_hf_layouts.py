"""Layouts of a name map against their definitions by elements, both ways; exports of sharded checkpoints."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from hf_models import architecture, moe_architecture, write_run
from meshwright.checkpoint.checkpoint import load_parameters, read_metadata
from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.format.durable import remove
from meshwright.checkpoint.hf.export import export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.maps import layouts
from meshwright.checkpoint.hf.maps.layouts import row_ranges, to_ours, to_theirs
from meshwright.checkpoint.hf.weights import HfWeights
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.safetensors import weight_files
from meshwright.checkpoint.saving import Extent, SaveRequest, with_bytes, write_checkpoint
from meshwright.checkpoint.section import SectionReader
from meshwright.checkpoint.shards import Shard
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.name_map import Part, Rename
from meshwright.spec.run.run import Run

SIZES = st.integers(1, 5)


def distinct(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@given(SIZES, SIZES)
def test_a_transposed_matrix(rows: int, columns: int) -> None:
    rename, ours = Rename("a", "b", is_transposed=True), distinct(rows, columns)
    theirs = to_theirs([rename], [ours])
    assert tuple(theirs.shape) == rename.their_shape(ours.shape) == (columns, rows)
    assert all(theirs[j, i] == ours[i, j] for i in range(rows) for j in range(columns))
    assert torch.equal(to_ours(rename, [theirs]), ours)


@given(st.lists(SIZES, min_size=1, max_size=4), SIZES, st.sampled_from([0, 1]), st.booleans())
def test_parts_of_a_fused_matrix(shares: list[int], width: int, dim: int, is_transposed: bool) -> None:
    renames = [Rename(f"{i}", "b", is_transposed, Part(i, tuple(shares), dim)) for i in range(len(shares))]
    theirs = distinct(*((2 * sum(shares), width) if dim == 0 else (width, 2 * sum(shares))))
    ours = [to_ours(rename, [theirs]) for rename in renames]
    start = 0
    for share, rename, one in zip(shares, renames, ours, strict=True):
        expected = theirs[start : start + 2 * share] if dim == 0 else theirs[:, start : start + 2 * share]
        assert torch.equal(one, expected.T if is_transposed else expected)
        assert rename.their_shape(one.shape) == tuple(theirs.shape)
        start += 2 * share
    assert torch.equal(to_theirs(renames, ours), theirs)


@given(SIZES, SIZES, SIZES)
def test_rows_of_rope_that_turn_neighbours(num_heads: int, half: int, width: int) -> None:
    rename, theirs = Rename("a", "b", interleaved_heads=num_heads), distinct(2 * half * num_heads, width)
    ours = to_ours(rename, [theirs])
    for head in range(num_heads):
        first = head * 2 * half
        for i in range(half):
            assert torch.equal(ours[first + i], theirs[first + 2 * i])
            assert torch.equal(ours[first + half + i], theirs[first + 2 * i + 1])
    assert torch.equal(to_theirs([rename], [ours]), theirs)


def test_experts_are_stacked_each_in_its_layout() -> None:
    rename, experts = Rename("a", "b.{e}", is_transposed=True), [distinct(2, 3) + 10 * e for e in range(4)]
    ours = to_ours(rename, experts)
    assert rename.their_shape(ours.shape) == (2, 3)
    assert all(torch.equal(ours[e], expert.T) for e, expert in enumerate(experts))
    assert all(torch.equal(to_theirs([rename], [ours[e]]), expert) for e, expert in enumerate(experts))


@given(st.integers(0, 200), SIZES, st.integers(1, 100))
def test_pieces_cover_all_rows_in_order(num_rows: int, width: int, piece_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "PIECE_BYTES", piece_bytes)
        ranges = row_ranges(Rename("a", "b"), (num_rows, width), 4)
    assert [row for start, end in ranges for row in range(start, end)] == list(range(num_rows))
    assert all(end - start == 1 or (end - start) * width * 4 <= piece_bytes for start, end in ranges)
    assert row_ranges(Rename("a", "b", is_transposed=True), (num_rows, width), 4) == [(0, num_rows)]
    assert row_ranges(Rename("a", "b"), (), 4) == [(0, 1)]


def reshard(checkpoint: Path, dim: int) -> None:
    """Write the checkpoint again with each tensor in two shards along `dim`, where it has it."""
    parameters = load_parameters(checkpoint)

    def shards() -> Iterator[tuple[Extent, memoryview]]:
        for name, tensor in parameters.items():
            along = min(dim, tensor.dim() - 1)
            start = 0
            for part in tensor.tensor_split(2, along):
                offsets = tuple(start if i == along else 0 for i in range(tensor.dim()))
                box = Box(offsets, tuple(part.shape))
                yield from with_bytes([Shard(f"model/{name}", "float32", tuple(tensor.shape), box, part)])
                start += part.shape[along]

    metadata = read_metadata(checkpoint)
    remove(checkpoint)
    tensors = {f"model/{name}": ("float32", tuple(tensor.shape)) for name, tensor in parameters.items()}
    write_checkpoint(SaveRequest(checkpoint, metadata, ["model"], tensors), shards(), GroupPeers())


@pytest.mark.parametrize("model", [architecture(), moe_architecture()], ids=["dense", "experts"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("piece_bytes", [1, 5_000])
def test_an_export_in_pieces_of_any_layout_has_the_same_bytes(
    tmp_path: Path, model: LlamaArchitecture, dim: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "whole")
    reshard(Run(tmp_path / "run").checkpoint(3), dim)
    monkeypatch.setattr(layouts, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(weight_files, "PIECE_BYTES", piece_bytes)
    export(tmp_path / "run", tmp_path / "pieces")
    whole, pieces = (tmp_path / name / "model.safetensors" for name in ("whole", "pieces"))
    assert whole.read_bytes() == pieces.read_bytes()
    assert all(tensor.is_contiguous() for tensor in load_file(pieces).values())


@pytest.mark.parametrize("model", [architecture(), moe_architecture()], ids=["dense", "experts"])
def test_no_more_than_a_piece_is_read_at_a_time(
    tmp_path: Path, model: LlamaArchitecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece_bytes = 4_096
    monkeypatch.setattr(layouts, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(weight_files, "PIECE_BYTES", piece_bytes)
    sizes: list[int] = []

    def recording(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(*arguments: object) -> Tensor:
            tensor = read(*arguments)
            sizes.append(tensor.nbytes)
            return tensor

        return recorded

    monkeypatch.setattr(SectionReader, "read", recording(SectionReader.read))
    monkeypatch.setattr(HfWeights, "read", recording(HfWeights.read))
    write_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out")
    num_exported = sum(sizes)
    import_folder(tmp_path / "out", tmp_path / "again")
    assert num_exported == sum(sizes) - num_exported
    assert max(sizes) <= piece_bytes < 264 * model.dim * 4
