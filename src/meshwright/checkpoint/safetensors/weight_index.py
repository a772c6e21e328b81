"""stored_files: the weight files of a Hugging Face folder by their headers and the index; needs no torch."""

import json
import re
from pathlib import Path
from typing import Any

from meshwright.checkpoint.safetensors.safetensors_header import StoredEntry, read_entries, unique_keys
from meshwright.errors import CheckpointError, ConfigError
from meshwright.units import first_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
WEIGHT_FILES = "|".join((re.escape(INDEX), re.escape(SINGLE), _SHARD.pattern))
"""Regular expression of the names of all files with weights and of their index."""
_AGAIN = "copy the whole folder again"


def stored_files(folder: Path) -> dict[str, dict[str, StoredEntry]]:
    """Return the tensors of each weight file of `folder`, by its name.

    Raises CheckpointError for missing, truncated or stray files and for keys that the index and the files do not both
    have exactly once, ConfigError for a folder without weights.
    """
    files = {}
    for name, keys in _expected_keys(folder).items():
        files[name] = read_entries(folder / name)
        if keys is not None:
            _require_keys(folder / name, set(files[name]), keys)
    return files


def _require_keys(path: Path, present: set[str], keys: set[str]) -> None:
    """Raise CheckpointError unless the file `path`, with the keys `present`, has exactly those of the index."""
    if lost := sorted(keys - present):
        raise CheckpointError(f"{path} lacks {first_of(lost)}, which {INDEX} assigns to it: {_AGAIN}")
    if extra := sorted(present - keys):
        raise CheckpointError(
            f"{path} holds {first_of(extra)}, which {INDEX} assigns to another file or to none: {_AGAIN}"
        )


def _expected_keys(folder: Path) -> dict[str, set[str] | None]:
    """Return the files, each with the keys that the index assigns to it; None without an index."""
    has_index, has_single = ((folder / name).is_file() for name in (INDEX, SINGLE))
    shards = {path.name for path in folder.glob("*.safetensors") if _SHARD.fullmatch(path.name)}
    if has_single and (has_index or shards):
        other = INDEX if has_index else sorted(shards)[0]
        raise ConfigError(
            f"{folder} holds both {SINGLE} and {other}, which may be different models: remove one of them"
        )
    if has_single:
        return {SINGLE: None}
    if not has_index:
        raise ConfigError(_no_weights(folder, sorted(shards)))
    by_file = _index(folder)
    if stray := sorted(shards - by_file.keys()):
        raise CheckpointError(f"{folder} holds {first_of(stray)}, which {INDEX} does not name: {_AGAIN}")
    return dict(by_file)


def _index(folder: Path) -> dict[str, set[str]]:
    """Return the keys of each file by the index; raises CheckpointError for an invalid index or a missing file."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map: {_AGAIN}")
    by_file: dict[str, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX} assigns {key} to {name!r}, which is no file name: {_AGAIN}")
        by_file.setdefault(name, set()).add(key)
    for name, keys in sorted(by_file.items()):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} lacks {name}, which holds {len(keys)} of its {len(weight_map)} tensors: {_AGAIN}"
            )
    return dict(sorted(by_file.items()))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ConfigError if missing, CheckpointError if damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: name the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object: copy it again")
    return value


def _no_weights(path: Path, shards: list[str]) -> str:
    """Return what is wrong with a folder that has neither an index nor a single file."""
    what = f"{path} holds neither {SINGLE} nor {INDEX}"
    if shards:
        return f"{what}, but {first_of(shards)}: copy {INDEX}, which names all of the files, too"
    others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in path.glob(pattern))
    hint = f" ({others[0]} is a pickle, which is not read: convert it to safetensors)" if others else ""
    return f"{what}{hint}: name the folder of a Hugging Face model"
