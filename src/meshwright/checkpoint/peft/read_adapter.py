"""read_peft_folder: the tensors of an adapter that PEFT has saved, under our names, each key accounted for."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.hf.hf_model import HfModel
from meshwright.checkpoint.peft.peft_config import ADAPTER_WEIGHTS, config_problems
from meshwright.checkpoint.peft.peft_names import keys_of
from meshwright.checkpoint.safetensors.safetensors_file import DTYPES, SafetensorsFile
from meshwright.errors import ConfigError
from meshwright.spec.step.adapter import Adapter
from meshwright.units import first_of

_NUM_NAMED = 4


def read_peft_folder(
    folder: Path, adapter: Adapter, described: HfModel, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return an adapter's tensors by our names; `shapes` are those that the model expects.

    Raises ConfigError for an adapter of other sizes or layers, CheckpointError for a damaged folder, UnsupportedError
    for a model whose layers PEFT has no names for.
    """
    if problems := config_problems(folder, adapter):
        raise ConfigError("\n".join(problems))
    file = SafetensorsFile(folder / ADAPTER_WEIGHTS)
    keys = keys_of(shapes, described.name_map())
    present, expected = set(file.entries), set(keys.values())
    wrong = {"lacks": sorted(expected - present), "has no use for": sorted(present - expected)}
    wrong["has other sizes of"] = [
        key for name, key in keys.items() if key in present and file.entries[key].shape != shapes[name]
    ]
    wrong["has in another format than floating point"] = [
        key for key in sorted(present & expected) if not _is_float(file.entries[key].dtype)
    ]
    if texts := [f"{what} {first_of(names, _NUM_NAMED)}" for what, names in wrong.items() if names]:
        raise ConfigError(
            f"adapter.initial = {str(folder)!r} is not of these layers: the model {'; '.join(texts)}: make "
            "adapter.targets match the layers of the folder"
        )
    return {name: file.read(key) for name, key in keys.items()}


def _is_float(dtype: str) -> bool:
    return dtype in DTYPES and DTYPES[dtype].is_floating_point
