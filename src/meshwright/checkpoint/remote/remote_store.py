"""RemoteStore: the copy of a run's checkpoints at a URL, through fsspec.

    URL/manifest.json, URL/job.toml         of the run, so that a resume on an empty machine is the same run
    URL/checkpoints/step-20/rank-00000.bin  ...
    URL/checkpoints/step-20/checkpoint.json the index, uploaded last and removed first

A step is complete where its index exists; nothing else names the newest, so no such name can be wrong.
"""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import xxhash

from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.extras import import_extra

_BLOCK_BYTES = 8 << 20
_LOCAL: Final = ("file", "local")


class RemoteStore:
    """Files below a URL; every method raises CheckpointError that names the URL where it cannot be reached."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an unknown kind of URL, UnsupportedError where its package is not installed."""
        self.url = url.rstrip("/")
        fsspec = import_extra("fsspec", f"checkpoint.remote = {url!r}")
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False)
        except ImportError as error:
            raise UnsupportedError(
                f"checkpoint.remote = {url!r} needs a package that is not installed ({error}): install it; for s3:// "
                "run pip install '.[remote]' in Meshwright's checkout"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"checkpoint.remote = {url!r} is no URL that fsspec knows ({error}): write one such as "
                "s3://bucket/run, gs://bucket/run or file://PATH"
            ) from error
        self._root = str(root).rstrip("/")
        protocols = self._fs.protocol
        self.protocols: tuple[str, ...] = (protocols,) if isinstance(protocols, str) else tuple(protocols)

    @property
    def is_local(self) -> bool:
        """Return whether the URL is a folder that this machine has mounted."""
        return bool(set(self.protocols) & set(_LOCAL))

    def require_writable(self) -> None:
        """Write and remove a small file; creates the last folder of a local URL."""
        name = f".probe-{uuid.uuid4().hex}"
        with self._explained():
            if self.is_local:
                Path(self._root).mkdir(exist_ok=True)
            self._fs.pipe_file(f"{self._root}/{name}", b"meshwright")
            self._fs.rm_file(f"{self._root}/{name}")

    def steps(self) -> list[int]:
        """Return the steps that are complete, oldest first."""
        return [step for step in self.all_steps() if self.read(self._path(step, FILE_NAME)) is not None]

    def all_steps(self) -> list[int]:
        """Return the steps that have any file, complete or not, oldest first."""
        with self._explained():
            try:
                entries = self._fs.ls(f"{self._root}/checkpoints", detail=False)
            except FileNotFoundError:
                return []
        names = (str(entry).rstrip("/").rpartition("/")[2].removeprefix("step-") for entry in entries)
        return sorted(int(name) for name in names if name.isdigit())

    def contents(self, step: int) -> dict[str, Any] | None:
        """Return the contents of the index of `step`; None where it has none, or one that is no JSON."""
        data = self.read(self._path(step, FILE_NAME))
        try:
            contents = None if data is None else json.loads(data)["contents"]
        except (ValueError, KeyError, TypeError):
            return None
        return contents if isinstance(contents, dict) else None

    def put_run_file(self, name: str, data: bytes) -> None:
        """Upload a small file of the run, such as its manifest, of which training may write a newer one meanwhile."""
        path = self._path(None, name)
        with self._explained():
            if self.is_local:
                self._require_root()
                Path(f"{path}.part").write_bytes(data)
                Path(f"{path}.part").replace(path)
            else:
                self._fs.pipe_file(path, data)

    def put(self, local: Path, step: int, name: str) -> None:
        """Upload a file of a checkpoint and check its size."""
        path = self._path(step, name)
        with self._explained():
            if self.is_local:
                self._put_local(local, Path(path))
            else:
                self._fs.put_file(str(local), path)
        size = self.size(step, name)
        if size != local.stat().st_size:
            raise CheckpointError(f"{self.url}: {path} has {size} bytes after an upload of {local.stat().st_size}")

    def get(self, step: int, name: str, local: Path) -> None:
        """Download a file of a checkpoint."""
        with self._explained():
            self._fs.get_file(self._path(step, name), str(local))

    def size(self, step: int, name: str) -> int | None:
        """Return the size of a file; None where it does not exist."""
        with self._explained():
            try:
                return int(self._fs.info(self._path(step, name))["size"])
            except FileNotFoundError:
                return None

    def hash_of(self, step: int, name: str) -> str:
        """Return the xxh3_128 of a file, which is downloaded for it block by block."""
        digest = xxhash.xxh3_128()
        with self._explained(), self._fs.open(self._path(step, name), "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def hide(self, step: int) -> None:
        """Remove the index of `step`, if any, so that it is complete no more."""
        with self._explained():
            try:
                self._fs.rm_file(self._path(step, FILE_NAME))
            except FileNotFoundError:
                return

    def remove(self, step: int) -> None:
        """Remove `step`, its index first."""
        self.hide(step)
        with self._explained():
            try:
                self._fs.rm(f"{self._root}/checkpoints/step-{step}", recursive=True)
            except FileNotFoundError:
                return

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a small file; None where it does not exist."""
        with self._explained():
            try:
                return bytes(self._fs.cat_file(path))
            except FileNotFoundError:
                return None

    def read_run_file(self, name: str) -> bytes | None:
        """Return the bytes of a file of the run, such as its manifest; None where it does not exist."""
        return self.read(self._path(None, name))

    def _path(self, step: int | None, name: str) -> str:
        return f"{self._root}/{name}" if step is None else f"{self._root}/checkpoints/step-{step}/{name}"

    def _put_local(self, local: Path, target: Path) -> None:
        """Copy a file into a mounted folder under a temporary name, and rename it."""
        self._require_root()
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fs.put_file(str(local), f"{target}.part")
        Path(f"{target}.part").replace(target)

    def _require_root(self) -> None:
        """Raise FileNotFoundError for a folder that is no longer mounted, which must not be made on the disk below."""
        if not Path(self._root).is_dir():
            raise FileNotFoundError(f"{self._root} is gone")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the many file systems raise into one error of ours."""
        try:
            self._fs.invalidate_cache()
            yield
        except CheckpointError:
            raise
        except Exception as error:
            text = " ".join(str(error).split()) or "no reason given"
            raise CheckpointError(
                f"checkpoint.remote = {self.url!r} cannot be used ({type(error).__name__}: {text}): check that the "
                "bucket or folder exists, the credentials of its service in this environment, and the network"
            ) from error
