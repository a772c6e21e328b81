"""CompileCache: a folder of compiled code, written by `meshwright precompile`, that ranks read before they compile.

    cache.json   what it was made for (CacheKey), and the size and SHA-256 of each file
    rank-N.bin   torch's cache artifacts of rank N that no lower rank has; every rank reads all files

What it was made for only decides whether to read it: torch looks each graph up by a hash of its own, of the graph, the
compiler and its settings, so a cache never changes what is computed. Its files hold code that a rank runs: read one
only from where you would take a program.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

import meshwright
from meshwright.hardware.machine import processor_name
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.ranks import Ranks
from meshwright.units import counted, format_bytes

_INDEX = "cache.json"
_ARTIFACTS = ("inductor", "aot_autograd", "autotune")
"""Kinds of artifacts that make a rank's file worth keeping: what torch has seen of dynamic shapes is none."""
_CODE = ("models", "parallelism")
"""Packages whose code is compiled or decides what is."""


class CacheKey(NamedTuple):
    """What a cache is made for: another value in any of them makes it useless."""

    torch: str
    device: str
    code: str
    job: str

    @classmethod
    def of(cls, job: Job, ranks: Ranks) -> "CacheKey":
        """Return the key of a resolved job on these ranks."""
        layout = ranks.layout_of(job).to_dict()
        documents = [job.data.mask_documents, job.data.restarts_positions]
        parts = (job.model.to_dict(), layout, job.precision.to_dict(), job.train.seq_len, documents)
        return cls(torch.__version__, _device_name(ranks.device), _code_hash(), _hash(json.dumps(parts).encode()))

    def difference(self, other: "CacheKey") -> str | None:
        """Return in words how this, a cache's key, differs from what is run; None where it does not."""
        for name, ours, theirs in zip(self._fields, self, other, strict=True):
            if ours != theirs:
                what = {"code": "other code of Meshwright", "job": "another job or layout"}
                return f"it was made for {what.get(name, f'{name} {ours}, and this is {theirs}')}"
        return None


def cache_folder(job: Job, run: Run) -> Path:
    """Return where the cache of a job is: layout.compile_cache, or in its run folder."""
    return Path(job.layout.compile_cache) if job.layout.compile_cache else run.compile_cache


def load_cache(job: Job, run: Run, ranks: Ranks) -> str | None:
    """Give torch the cache of a job, if there is one that fits, and return one line for the log; None without a cache.

    A cache that is missing where the job names it, stale or damaged is reported and ignored.
    """
    folder = cache_folder(job, run)
    if not (folder / _INDEX).is_file():
        missing = f"compile cache {folder} ignored: it does not exist; `meshwright precompile` writes it"
        return missing if job.layout.compile_cache else None
    try:
        contents = _read(folder, CacheKey.of(job, ranks))
    except _Unusable as problem:
        return f"compile cache {folder} ignored: {problem}"
    found = [torch.compiler.load_cache_artifacts(content) for content in contents]
    if None in found:
        return f"compile cache {folder} ignored: torch {torch.__version__} cannot read it"
    return f"compile cache {folder}: {format_bytes(sum(map(len, contents)))} read"


def save_cache(folder: Path, key: CacheKey, ranks: Ranks) -> str:
    """Write what these ranks have compiled and return one line about it; a collective."""
    saved = torch.compiler.save_cache_artifacts()
    content, own = (b"", set[tuple[str, str]]()) if saved is None else (saved[0], _names(saved[1].artifacts))
    names = ranks.gather(own)
    lower = set[tuple[str, str]]().union(*names[: ranks.rank])
    entry = None
    if own - lower:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{ranks.rank}.bin"
        (folder / name).write_bytes(content)
        entry = {"name": name, "bytes": len(content), "sha256": _hash(content)}
    entries = [one for one in ranks.gather(entry) if one is not None]
    if ranks.is_first and entries:
        (folder / _INDEX).write_text(json.dumps({"key": key._asdict(), "files": entries}, indent=2) + "\n")
    size = format_bytes(sum(one["bytes"] for one in entries))
    return f"{folder}: {counted(len(set[tuple[str, str]]().union(*names)), 'artifact')}, {size}"


class _Unusable(Exception):
    """A cache that is stale or damaged; the text says how."""


def _read(folder: Path, key: CacheKey) -> list[bytes]:
    """Return the content of each file; raises _Unusable."""
    try:
        index = json.loads((folder / _INDEX).read_text())
        made_for, files = CacheKey(**index["key"]), index["files"]
        if (difference := made_for.difference(key)) is not None:
            raise _Unusable(difference)
        return [_checked(folder, entry) for entry in files]
    except OSError as error:
        raise _Unusable(f"{error.filename} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _Unusable(f"{_INDEX} is damaged; `meshwright precompile` writes it again") from error


def _checked(folder: Path, entry: dict[str, Any]) -> bytes:
    content = (folder / Path(entry["name"]).name).read_bytes()
    if _hash(content) != entry["sha256"]:
        raise _Unusable(f"{entry['name']} is damaged")
    return content


def _names(artifacts: dict[str, list[str]]) -> set[tuple[str, str]]:
    return {(kind, key) for kind in _ARTIFACTS for key in artifacts.get(kind, [])}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Inductor's code depends on the vector instructions and on the number of threads.
    return f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}, {counted(torch.get_num_threads(), 'thread')}"


def _code_hash() -> str:
    root = Path(meshwright.__path__[0])
    files = sorted(file for package in _CODE for file in (root / package).rglob("*.py"))
    return _hash(b"".join(file.read_bytes() for file in files))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
