"""What a job makes of the folder in model.initial_weights, seen without torch."""

from pathlib import Path

from meshwright.checkpoint.hf.maps.families import family_map
from meshwright.checkpoint.safetensors.weight_index import CONFIG, read_json, stored_files
from meshwright.config.load import DEFAULT, ResolvedJob
from meshwright.data.tokenizer_files import TOKENIZER, advice_to_make_one, other_tokenizer_files
from meshwright.errors import ConfigError, MeshwrightError, problems_raised_by
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.hf.hub_cache import hub_advice, local_path
from meshwright.spec.model.hf.name_map import NameMap
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.weight_shapes import weight_shapes
from meshwright.units import first_of

_NUM_NAMED = 4
_PLAIN = {"F64", "F32", "F16", "BF16"}


def tokenizer_note(resolved: ResolvedJob) -> str | None:
    """Return that the job leaves data.tokenizer out while its initial weights come with a tokenizer; else None."""
    weights = resolved.job.model.initial_weights
    if weights is None or resolved.origins["data.tokenizer"] != DEFAULT or is_object_source(resolved.job.data.source):
        return None
    folder = local_path(weights)
    others = other_tokenizer_files(folder)
    if not others and not (folder / TOKENIZER).is_file():
        return None
    advice = f"set data.tokenizer to {str(folder / TOKENIZER)!r}"
    if others:
        advice = f"{advice_to_make_one(str(folder), str(folder))}, then {advice}"
    return (
        "data is tokenized as bytes, the default of data.tokenizer, while model.initial_weights comes with a tokenizer "
        f"({', '.join(others) or TOKENIZER}): {advice}"
    )


def weight_problems(section: ModelSection) -> list[str]:
    """Return why the folder of model.initial_weights cannot be used, as its files, headers and shapes say it."""
    weights = section.initial_weights
    if weights is None:
        return []
    folder = local_path(weights)
    if not (folder / CONFIG).is_file():
        return [
            f"model.initial_weights = {weights!r} is no Hugging Face folder (it holds no config.json): "
            f"name one, or leave it out to start from random weights{hub_advice(weights)}"
        ]
    return problems_raised_by(lambda: _require_weights(folder, section))


def _require_weights(folder: Path, section: ModelSection) -> None:
    entries = {name: entry for file in stored_files(folder).values() for name, entry in file.items()}
    config = read_json(folder / CONFIG)
    try:
        architecture = resolve_architecture(section)
    except MeshwrightError:
        return  # Reported as a problem of model.source.
    if architecture is None:
        return
    shapes = weight_shapes(architecture)
    table = family_map(architecture, config).spelled_as(entries)
    expected = _expected(table, shapes)
    if all(entry.dtype in _PLAIN for entry in entries.values()) and (missing := sorted(expected.keys() - entries)):
        raise ConfigError(
            f"model.initial_weights = {str(folder)!r} lacks {first_of(missing, _NUM_NAMED)} of the model: make [model] "
            "match the weights"
        )
    wrong = [
        f"{name} is {list(entries[name].shape)}, the model has {list(shape)}"
        for name, shape in expected.items()
        if name in entries and entries[name].shape != shape
    ]
    if wrong:
        raise ConfigError(
            f"model.initial_weights = {str(folder)!r} has other sizes: {first_of(wrong, _NUM_NAMED, '; ')}: make "
            "[model] match the weights"
        )


def _expected(table: NameMap, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes by their names of what `table` has a name for."""
    expected = {}
    for ours, shape in shapes.items():
        renames = table.find_rows(ours)
        names = table.theirs(ours, shape) if renames else []
        for i, name in enumerate(names):
            expected[name] = renames[i * len(renames) // len(names)].their_shape(shape)
    return expected
