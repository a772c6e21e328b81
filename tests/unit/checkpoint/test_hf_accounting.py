"""Every key of a folder is mapped, dropped by name, or an error; damaged headers and indexes are errors, too."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from full_disk import no_file_larger_than
from hf_models import architecture, write_hf, write_run
from meshwright.checkpoint.checkpoint import save
from meshwright.checkpoint.format.leftovers import hold
from meshwright.checkpoint.hf.export import export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.hf.weights import load_hf_parameters
from meshwright.checkpoint.safetensors.safetensors_file import SafetensorsFile
from meshwright.checkpoint.torch_formats.dcp_export import export_dcp
from meshwright.errors import CheckpointError, ConfigError, MeshwrightError
from meshwright.models.build import build_architecture
from meshwright.models.initial import initialize
from meshwright.spec.run.run import Run

INDEX = "model.safetensors.index.json"
SECOND, THIRD = "model-00002-of-00005.safetensors", "model-00003-of-00005.safetensors"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of a small Llama in five files."""
    write_hf(tmp_path / "theirs", "llama", max_shard_size="20KB")
    return tmp_path / "theirs"


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def add(file: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to a file; "__" in names is "."."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(file), **named}, file, metadata={"format": "pt"})


def test_a_key_that_two_files_hold_is_an_error(theirs: Path) -> None:
    weight_map = json.loads((theirs / INDEX).read_text())["weight_map"]
    key = next(key for key, file in weight_map.items() if file == THIRD)
    add(theirs / SECOND, **{key: torch.zeros(1)})
    with pytest.raises(CheckpointError, match=rf"{SECOND} holds {key}, which .* assigns to another file or to none"):
        load_hf_parameters(theirs, architecture())


def test_a_key_that_no_index_names_is_an_error(theirs: Path) -> None:
    add(theirs / SECOND, extra=torch.zeros(1))
    with pytest.raises(CheckpointError, match=f"{SECOND} holds extra, which"):
        load_hf_parameters(theirs, architecture())


def test_an_index_without_a_file_and_its_keys_is_an_error(theirs: Path) -> None:
    def forget(weight_map: dict[str, str]) -> None:
        for key in [key for key, file in weight_map.items() if file == THIRD]:
            del weight_map[key]

    change_index(theirs, forget)
    with pytest.raises(CheckpointError, match=rf"holds {THIRD}, which {INDEX} does not name: copy"):
        load_hf_parameters(theirs, architecture())
    (theirs / THIRD).unlink()
    with pytest.raises(ConfigError, match=r"\d missing: model\.layers"):
        load_hf_parameters(theirs, architecture())


def test_a_key_that_an_index_names_twice_is_an_error(theirs: Path) -> None:
    text = (theirs / INDEX).read_text()
    key = "model.norm.weight"
    (theirs / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{key}": "{SECOND}",', 1))
    with pytest.raises(CheckpointError, match=rf"{INDEX} cannot be read \(the key {key} occurs twice\)"):
        load_hf_parameters(theirs, architecture())


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", 7, None])
def test_an_index_names_files_of_its_folder_only(theirs: Path, name: Any) -> None:
    change_index(theirs, lambda weight_map: weight_map.update({"model.norm.weight": name}))
    with pytest.raises(CheckpointError, match=r"assigns model\.norm\.weight to .*, which is no file name"):
        load_hf_parameters(theirs, architecture())


def test_shards_without_their_index_and_two_models_in_one_folder_are_errors(theirs: Path) -> None:
    shutil.copyfile(theirs / SECOND, theirs / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"holds both model\.safetensors and {INDEX}"):
        load_hf_parameters(theirs, architecture())
    (theirs / "model.safetensors").unlink()
    (theirs / INDEX).unlink()
    with pytest.raises(ConfigError, match=rf"but model-00001-of-00005.* copy {INDEX}"):
        load_hf_parameters(theirs, architecture())


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_changed_header_is_read_the_same_or_is_an_error(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("header") / "a.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.int64)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 49))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(CheckpointError):
        file = SafetensorsFile(path)
        assert sum(entry.num_bytes for entry in file.entries.values()) <= 48
        for name, entry in file.entries.items():
            if entry.dtype in ("F32", "I64"):
                assert file.read(name).numel() * file.read(name).itemsize == entry.num_bytes


def test_a_checkpoint_with_a_tensor_too_few_or_too_many_is_not_exported(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    model = build_architecture(architecture())
    initialize(model, 0)
    parameters = dict(model.named_parameters())
    run = Run(tmp_path / "run")
    changes: dict[int, dict[str, Any]] = {
        4: {**parameters, "blocks.2.norm.weight": torch.ones(3)},
        5: {name: value for name, value in parameters.items() if name != "blocks.1.ffn.up.weight"},
        6: {**parameters, "norm.weight": torch.ones(31)},
    }
    problems = ["holds unknown blocks.2.norm", "lacks blocks.1.ffn.up", "has other sizes of norm.weight"]
    for (step, state), problem in zip(changes.items(), problems, strict=True):
        save(run.checkpoint(step), {"model": state}, {"step": step})
        with pytest.raises(CheckpointError, match=problem):
            export(tmp_path / "run", tmp_path / "out", step=step)
    assert not (tmp_path / "out").exists()


def test_overwrite_replaces_what_the_command_wrote_and_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    for name in ("notes", "run", "file"):
        with pytest.raises(ConfigError, match="is nothing that export writes, so --overwrite does not replace it"):
            export(tmp_path / "run", tmp_path / name, overwrite=True)
    export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "out" / "chat_template.jinja").write_text("stale")
    export(tmp_path / "run", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()

    for name in ("notes", "run", "out"):
        with pytest.raises(ConfigError, match="is nothing that import writes"):
            import_folder(tmp_path / "out", tmp_path / name, overwrite=True)
    import_folder(tmp_path / "out", tmp_path / "imported")
    import_folder(tmp_path / "out", tmp_path / "imported", overwrite=True)
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "imported", "notes", "out", "run"]


def test_leftovers_of_a_killed_command_are_removed_and_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "run", architecture())
    names = ("out", "1"), ("out", "2"), ("o", "3")
    stale, alive, other = (tmp_path / f"{name}.tmp-{digit * 32}" for name, digit in names)
    for folder in (stale, alive, other):
        folder.mkdir()
    held = hold(alive)
    export(tmp_path / "run", tmp_path / "out")
    os.close(held)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run", "out", alive.name, other.name])
    assert caplog.messages == [f"removed {stale}, which a command that was stopped had left"]


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path / "run", architecture())
    link, folder = tmp_path / "link", tmp_path / "elsewhere" / "out"
    link.symlink_to(folder)
    export(tmp_path / "run", link)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="link exists, and export replaces nothing without --overwrite"):
        export(tmp_path / "run", link)
    export(tmp_path / "run", link, overwrite=True)
    assert link.is_symlink()
    assert (folder / "model.safetensors").is_file()
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    assert not caplog.records


def test_overwrite_keeps_files_that_the_command_does_not_know(tmp_path: Path) -> None:
    write_run(tmp_path / "run", architecture())
    outs = {name: tmp_path / name for name in ("hf", "dcp", "imported")}
    export(tmp_path / "run", outs["hf"])
    export_dcp(tmp_path / "run", outs["dcp"])
    import_folder(outs["hf"], outs["imported"])
    for out in outs.values():
        (out / "more").mkdir()
        (out / "more" / "thesis.txt").write_text("years of work")
    for write in (
        lambda: export(tmp_path / "run", outs["hf"], overwrite=True),
        lambda: export_dcp(tmp_path / "run", outs["dcp"], overwrite=True),
        lambda: import_folder(outs["hf"], outs["imported"], overwrite=True),
    ):
        with pytest.raises(ConfigError, match=r"also holds more/thesis\.txt, which \w+ does not write and --overwrite"):
            write()
    assert all((out / "more" / "thesis.txt").read_text() == "years of work" for out in outs.values())


def test_a_failed_overwrite_leaves_the_old_folder(theirs: Path, tmp_path: Path) -> None:
    import_folder(theirs, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    file = theirs / SECOND
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=f"{SECOND} cannot be read as safetensors"):
        import_folder(theirs, tmp_path / "run", overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("verb", ["export", "import"])
def test_too_little_space_and_a_target_below_a_file_are_errors_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    write_run(tmp_path / "run", architecture())
    export(tmp_path / "run", tmp_path / "theirs")
    (tmp_path / "file").write_text("")

    def convert(target: Path) -> None:
        if verb == "export":
            export(tmp_path / "run", target)
        else:
            import_folder(tmp_path / "theirs", target)

    with pytest.raises(CheckpointError, match=r"could not be written \(Not a directory\): name a folder that"):
        convert(tmp_path / "file" / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 99, 99))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"needs 11\d KiB, and its disk has 99 B free: free space there, or name"):
        convert(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run", "theirs"]


def test_a_disk_that_becomes_full_during_an_import_leaves_nothing(theirs: Path, tmp_path: Path) -> None:
    said = r"^step-0 could not be .*File too large\), and was removed: free space"
    with no_file_larger_than(30_000), pytest.raises(CheckpointError, match=said):
        import_folder(theirs, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_an_unknown_family_is_named_with_what_is_supported(theirs: Path, tmp_path: Path) -> None:
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(MeshwrightError, match=r"model_type = 'mamba', but Meshwright reads gpt2, llama, .* only"):
        import_folder(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()
