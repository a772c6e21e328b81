"""DcpFolder: the tensors of a torch.distributed.checkpoint folder, each shard read on request.

Its index is a pickle, which read_dcp_metadata reads without running its code: each class that such an index names is
replaced by an inert record, and any other name is refused, so no code that the file chooses is called.
"""

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.format.boxes import Box, coverage_problem, intersection
from meshwright.checkpoint.torch_formats.checksums import verify_checksums
from meshwright.checkpoint.torch_formats.torch_file import load_tensors
from meshwright.errors import CheckpointError

FILE_NAME = ".metadata"

_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


class DcpShard(NamedTuple):
    """A box of one tensor and where its bytes, a torch.save file, lie."""

    box: Box
    file: str
    start: int
    num_bytes: int


class DcpTensor(NamedTuple):
    """One tensor of a folder; its shards cover it exactly once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[DcpShard, ...]


class _Record:
    """Replaces an object of a class of torch: holds its state and has no behavior."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        return self.state[name]


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Bytes(_Record):
    pass


class _MetadataIndex(_Record):
    pass


def _nothing(*_: Any) -> None:
    return None


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    return tuple(sizes)


_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "MetadataIndex"): _MetadataIndex,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _nothing,
    (_FILESYSTEM, "_StorageInfo"): _Record,
    (_FILESYSTEM, "_StoragePrefix"): _Record,
    ("torch", "Size"): _size,
    # By which Python before 3.11.4 writes members of an enum: of memory formats, the only one here.
    ("builtins", "getattr"): _nothing,
    ("torch.serialization", "_get_layout"): _nothing,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib", "WindowsPath"): _nothing,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such index contains")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to other files")


def read_dcp_metadata(folder: Path) -> tuple[dict[str, DcpTensor], list[str]]:
    """Return the tensors by name, and the names of everything else; raises CheckpointError for an invalid index."""
    path = folder / FILE_NAME
    try:
        root = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(root, _Metadata):
            raise TypeError("it holds no Metadata")
        return _tensors(root)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}: copy the whole folder again") from None
    # A damaged pickle raises almost any of the built-in exceptions.
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy the whole folder again") from error


def _tensors(root: _Metadata) -> tuple[dict[str, DcpTensor], list[str]]:
    shards: dict[str, list[DcpShard]] = {}
    entries = root.field("state_dict_metadata")
    sizes = {
        (name, tuple(chunk.field("offsets"))): tuple(chunk.field("sizes"))
        for name, entry in entries.items()
        if isinstance(entry, _Tensor)
        for chunk in entry.field("chunks")
    }
    for index, info in root.field("storage_data").items():
        name = index.field("fqn")
        if isinstance(entries[name], _Tensor):
            # A field with its default is absent.
            offsets = tuple(index.state.get("offset") or ())
            box = Box(offsets, sizes[name, offsets])
            shards.setdefault(name, []).append(_shard(name, box, info))
    tensors = {}
    for name, entry in entries.items():
        if isinstance(entry, _Tensor):
            tensors[name] = _tensor(name, entry, shards.get(name, []))
    return tensors, sorted(entries.keys() - tensors.keys())


def _shard(name: str, box: Box, info: _Record) -> DcpShard:
    file, start, num_bytes = (info.field(key) for key in ("relative_path", "offset", "length"))
    if info.state.get("transform_descriptors"):
        raise CheckpointError(f"{name} is stored with {info.state['transform_descriptors']}, which is not read")
    if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
        raise CheckpointError(f"{name} lies in {file!r}, outside of the folder")
    if not all(type(value) is int and value >= 0 for value in (*box.offsets, *box.shape, start, num_bytes)):
        raise CheckpointError(f"{name} has an invalid place")
    return DcpShard(box, file, start, num_bytes)


def _tensor(name: str, entry: _Tensor, shards: list[DcpShard]) -> DcpTensor:
    dtype, shape = entry.field("properties").state[0], tuple(entry.field("size"))
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name} has the dtype {dtype!r}")
    boxes = [shard.box for shard in shards if shard.box.numel]
    if (problem := coverage_problem(boxes, shape)) is not None:
        raise CheckpointError(f"{name}: {problem}")
    return DcpTensor(dtype, shape, tuple(shards))


class DcpFolder:
    """A folder whose index was checked; a shard of a tensor is read as torch.save wrote it, by weights_only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors, self.others = read_dcp_metadata(path)
        # Shards of the tensor that was read last: torch.load reads whole ones, and an import asks for a few rows.
        self._loaded: tuple[str, dict[Box, Tensor]] = ("", {})

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor, or its `rows` (start, end) of dim 0."""
        tensor = self._tensors[name]
        box = Box((0,) * len(tensor.shape), tensor.shape)
        if rows is not None and tensor.shape:
            box = Box((rows[0], *box.offsets[1:]), (rows[1] - rows[0], *box.shape[1:]))
        if self._loaded[0] != name:
            self._loaded = (name, {})
        loaded = self._loaded[1]
        whole = torch.empty(box.shape, dtype=tensor.dtype)
        for shard in tensor.shards:
            if (common := intersection(shard.box, box)) is not None:
                if shard.box not in loaded:
                    loaded[shard.box] = self._load(name, tensor, shard)
                whole[common.within(box)] = loaded[shard.box][common.within(shard.box)]
        return whole

    def _load(self, name: str, tensor: DcpTensor, shard: DcpShard) -> Tensor:
        path = self.path / shard.file
        try:
            with path.open("rb") as file:
                file.seek(shard.start)
                data = file.read(shard.num_bytes)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): copy the whole folder again") from error
        verify_checksums(io.BytesIO(data), path)
        loaded = load_tensors(io.BytesIO(data), path)
        if not isinstance(loaded, Tensor) or (loaded.dtype, tuple(loaded.shape)) != (tensor.dtype, shard.box.shape):
            raise CheckpointError(
                f"{path}: bytes {shard.start} to {shard.start + shard.num_bytes} are not the shard of {name} that the "
                "index describes: copy the whole folder again"
            )
        return loaded
