"""Files of a checkpoint, format 2: an index that all read, and what each rank wrote.

    step-20/
      checkpoint.json     the index, written last: save id, metadata, and the hash of each rank's manifest
      rank-00000.json     the manifest of rank 0: box, byte range and hash of each shard in its data file
      rank-00000.bin      raw little-endian tensor data, one shard after the other
      rank-00001.json ...

JSON and raw bytes only, no pickle, so that a damaged or foreign checkpoint cannot run code. The index grows with the
ranks (about 80 bytes each) and a manifest with the tensors of one rank, so no file and no rank holds ranks x tensors.
Format 1 had all manifests in checkpoint.json; it is still read.
"""

import json
import re
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import Field, ValidationError

from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.format.format_1 import upgraded
from meshwright.errors import CheckpointError, DamagedCheckpoint
from meshwright.spec.frozen import Frozen

FORMAT_VERSION: Final = 2
_SET_ASIDE = "a resume sets it aside"
_NO_OLDER = "there is no older checkpoint next to it"
_IS_ASIDE = "no resume reads it"


class StoredShard(Frozen):
    """A box of one tensor, and its bytes in the rank's data file."""

    offsets: tuple[int, ...]
    """Index of the shard's first element in the whole tensor, by dim."""
    shape: tuple[int, ...]
    """Elements of the shard, by dim."""
    start: int
    """First byte in the file."""
    num_bytes: int
    """Bytes in the file."""
    xxh3_128: str
    """Hash of these bytes, in hexadecimal."""

    @property
    def box(self) -> Box:
        """Return the elements of the whole tensor that this shard holds."""
        return Box(self.offsets, self.shape)


class StoredTensor(Frozen):
    """The shards of one tensor that one rank wrote."""

    dtype: str
    """Name of the torch dtype, such as float32."""
    shape: tuple[int, ...]
    """Elements of the whole tensor, by dim."""
    shards: list[StoredShard]
    """Its shards, without empty ones."""


class RankManifest(Frozen):
    """What one rank wrote."""

    save_id: str
    """Random id of the save, the same in all files of a checkpoint."""
    rank: int
    """The rank that wrote it; its data file is rank-RANK.bin."""
    num_bytes: int
    """Size of the data file."""
    tensors: dict[str, StoredTensor]
    """By name: section/fqn, such as model/norm.weight or optimizer/norm.weight/exp_avg."""


class RankFile(Frozen):
    """One rank's files, as the index knows them."""

    num_bytes: int
    """Size of the data file."""
    manifest_xxh3_128: str
    """Hash of the manifest's bytes, in hexadecimal."""


class Index(Frozen):
    """Contents of checkpoint.json."""

    format_version: Literal[1, 2] = FORMAT_VERSION
    """Version of this format."""
    save_id: str
    """Random id of this save."""
    metadata: dict[str, Any]
    """Metadata given to save: step, layout, data position, ..."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of meshwright and torch that saved it."""
    sections: list[str]
    """Top-level keys of the saved state, such as model and optimizer."""
    ranks: list[RankFile] = Field(min_length=1)
    """Files of each rank."""
    manifests: list[RankManifest] | None = None
    """What each rank wrote, in format 1; None where each rank's manifest is a file."""


def data_name(rank: int) -> str:
    """Return the name of the data file of `rank`."""
    return f"rank-{rank:05d}.bin"


def manifest_name(rank: int) -> str:
    """Return the name of the manifest of `rank`."""
    return f"rank-{rank:05d}.json"


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3_128 of `data` in hexadecimal; 5 GB/s on one core."""
    return xxhash.xxh3_128_hexdigest(data)


def index_text(index: Index) -> str:
    """Return the text of checkpoint.json."""
    body = index.model_dump(mode="json", exclude_none=True)
    return json.dumps({"checksum": _checksum(body), "contents": body})


def read_index(folder: Path) -> Index:
    """Return the index of the checkpoint in `folder`; raises CheckpointError if missing, damaged or too new."""
    body = _read_body(folder)
    version = body.get("format_version")
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {version}, but this version of meshwright reads 1 to {FORMAT_VERSION}: "
            "load it with the meshwright that saved it (see versions in the run's manifest.json)"
        )
    try:
        index = Index.from_json(json.dumps(upgraded(body) if version == 1 else body))
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / FILE_NAME} is damaged ({error}): {remedy(folder)}") from error
    if is_named_for_another_step(folder, index.metadata):
        raise DamagedCheckpoint(
            f"{folder}: its metadata is of step {index.metadata['step']}: the folder was renamed or copied: "
            f"give it back its name, or {remedy(folder)}"
        )
    return index


def step_of(folder: Path) -> int | None:
    """Return the step that a checkpoint's folder is named for, None for another name."""
    own = folder.name.removeprefix("step-").partition(".")[0]
    return int(own) if own.isdigit() else None


def is_named_for_another_step(folder: Path, metadata: dict[str, Any]) -> bool:
    """Return whether `folder` is named for a step, and `metadata` is of another."""
    step, named = metadata.get("step"), step_of(folder)
    return step is not None and named is not None and step != named


def read_manifest(folder: Path, index: Index, rank: int) -> RankManifest:
    """Return what `rank` wrote; raises CheckpointError if it is missing, damaged or of another save."""
    if index.manifests is not None:
        return index.manifests[rank]
    path = folder / manifest_name(rank)
    data = read_file(folder, path.name)
    if hash_bytes(data) != index.ranks[rank].manifest_xxh3_128:
        other = _save_id(data)
        what = "its hash differs" if other in (None, index.save_id) else f"it is of save {other}, not {index.save_id}"
        raise DamagedCheckpoint(f"{path} is damaged ({what}): {remedy(folder)}")
    return RankManifest.from_json(data.decode())


def read_file(folder: Path, name: str) -> bytes:
    """Return the bytes of a small file of a checkpoint; raises DamagedCheckpoint if it is missing."""
    path = folder / name
    if path.exists() and not path.is_file():
        raise DamagedCheckpoint(f"{path} is no file: {remedy(folder)}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing: {remedy(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its disk and permissions") from error


def size_problem(folder: Path, index: Index, rank: int) -> str | None:
    """Return what is wrong with the size of a rank's data file, without reading it; None if nothing is."""
    path, expected = folder / data_name(rank), index.ranks[rank].num_bytes
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path} is missing ({error.strerror}): {remedy(folder)}"
    if not path.is_file():
        return f"{path} is no file: {remedy(folder)}"
    return None if size == expected else f"{path} has {size} bytes, {expected} were saved: {remedy(folder)}"


def remedy(folder: Path) -> str:
    """Return the fix for a damaged checkpoint: the next older one, if any; none for one that was set aside."""
    own, _, is_aside = folder.name.removeprefix("step-").partition(".")
    if is_aside:
        return f"{_IS_ASIDE}: it was set aside, and may be deleted"
    steps = [int(name) for path in folder.parent.glob("step-*") if (name := path.name.removeprefix("step-")).isdigit()]
    older = [
        step
        for step in steps
        if own.isdigit() and step < int(own) and (folder.parent / f"step-{step}" / FILE_NAME).is_file()
    ]
    if older:
        return f"{_SET_ASIDE} and takes step-{max(older)}, if that is intact"
    if own.isdigit() and (newer := [step for step in steps if step > int(own)]):
        return f"{_NO_OLDER}: restore this folder from a copy, or delete it if step-{max(newer)} is intact"
    return f"{_NO_OLDER}: restore this folder from a copy, or delete it and start again"


def without_remedy(text: str) -> str:
    """Return the message of a damaged checkpoint, a line each of several ranks, without what is done about it."""
    remedies = rf"(?:: |, or )(?:{_SET_ASIDE}|{_NO_OLDER}|{_IS_ASIDE})"
    return "\n".join(re.split(remedies, line, maxsplit=1)[0] for line in text.splitlines())


def _read_body(folder: Path) -> dict[str, Any]:
    path = folder / FILE_NAME
    if path.exists() and not path.is_file():
        raise DamagedCheckpoint(f"{path} is no file: {remedy(folder)}")
    try:
        data = path.read_bytes()
        document = json.loads(data)
        body, checksum = document["contents"], document["checksum"]
    except FileNotFoundError:
        what = f"has no {FILE_NAME}, so it is no complete checkpoint" if folder.is_dir() else "does not exist"
        raise DamagedCheckpoint(f"{folder} {what}: {remedy(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = "it is no index of a checkpoint" if data.rstrip().endswith(b"}") else f"cut off after {len(data)} bytes"
        raise DamagedCheckpoint(f"{path} is damaged ({what}): {remedy(folder)}") from error
    if not isinstance(body, dict) or _checksum(body) != checksum:
        raise DamagedCheckpoint(f"{path} is damaged (its checksum does not match): {remedy(folder)}")
    return body


def _save_id(data: bytes) -> str | None:
    try:
        value = json.loads(data)["save_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _checksum(body: Any) -> str:
    return hash_bytes(json.dumps(body, sort_keys=True).encode())
