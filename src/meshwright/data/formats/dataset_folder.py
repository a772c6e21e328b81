"""Folders that state which files they consist of: Hugging Face's save_to_disk, and MDS."""

import json
from pathlib import Path

from meshwright.data.formats.mds import INDEX, mds_shards
from meshwright.errors import DataError

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def dataset_files(folder: Path) -> list[Path] | None:
    """Return the files of a saved dataset in order; None for any other folder.

    Raises DataError for several splits, of which one is to be named, and for files that cannot be read.
    """
    if (folder / INDEX).is_file():
        return mds_shards(folder)
    if (folder / _SPLITS).is_file():
        splits = _read(folder / _SPLITS, "splits")
        raise DataError(
            f"data.source = {str(folder)!r} is a dataset of the splits {', '.join(map(str, splits))}: name the folder "
            f"of one, such as {str(folder / str(next(iter(splits), 'train')))!r}"
        )
    if not (folder / _STATE).is_file() or not (folder / "dataset_info.json").is_file():
        return None
    state = folder / _STATE
    if _read(state, "_indices_files", []) or _read(state, "_indices_data_files", []):
        raise DataError(f"{state} selects rows by an index, as old versions of datasets wrote: save it again")
    return [folder / file["filename"] for file in _read(state, "_data_files")]


def _read(file: Path, key: str, default: list[dict[str, str]] | None = None) -> list[dict[str, str]]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        found: list[dict[str, str]] = (values[key] if default is None else values.get(key)) or default or []
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not what datasets writes ({error!r}): save the dataset again") from error
