"""A class of the user's own and one table: every kind of row out and in again, bit by bit, or an error before that."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import own_models
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.checkpoint.hf.import_ import import_folder
from meshwright.checkpoint.torch_formats.dcp_export import export_dcp
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.hf import Drop, HuggingFaceFormat, NameMap, Part, Rename
from meshwright.models.build import build_model
from meshwright.spec.model.hf.name_map_check import name_map_problems
from meshwright.spec.run.run import Run
from meshwright.trainer.step.build_pipeline import described_for_hf, fill_from_hf
from own_models import own_job, write_own_run


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Return rows (first half, second half) of each head as neighbours, row by row."""
    half = rows.shape[0] // num_heads // 2
    order = [2 * half * h + i + part * half for h in range(num_heads) for i in range(half) for part in (0, 1)]
    return rows[order]


def apart(rows: Tensor, num_heads: int) -> Tensor:
    """Return rows of neighbours as (first half, second half) of each head."""
    size = rows.shape[0] // num_heads
    return rows[[size * h + i for h in range(num_heads) for i in (*range(0, size, 2), *range(1, size, 2))]]


def expected_theirs(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the table says, written with the operations of torch."""
    theirs = {"embed.weight": ours["embedding.weight"], "down_proj.weight": ours["down"].T}
    theirs |= {f"final.{kind}.{i}": ours[f"norms.{i}.{kind}"] for i in (0, 1) for kind in ("weight", "bias")}
    theirs["fused.weight"] = torch.cat([ours["wide"], ours["narrow"]]).T
    query, key, theirs["v.weight"] = ours["qkv"].split((24, 12, 12))
    theirs["rotated.weight"] = interleaved(ours["rotated"], 2)
    for e in range(3):
        theirs[f"experts.{e}.down.weight"] = ours["experts"][e].T
        theirs[f"experts.{e}.w1.weight"], theirs[f"experts.{e}.w3.weight"] = ours["gate_up"][e].chunk(2)
        theirs[f"experts.{e}.both.weight"] = torch.cat([ours["first"][e], ours["second"][e]])
    theirs["scale"] = ours["buffer.scale"]
    theirs["q.weight"], theirs["k.weight"] = apart(query, 4), apart(key, 2)
    return theirs


def test_every_kind_of_row_is_what_the_table_says_and_comes_back(tmp_path: Path) -> None:
    ours = write_own_run(tmp_path / "run", "EveryRow")
    done = export(tmp_path / "run", tmp_path / "out", weights=ExportFormat(max_shard_bytes=900))
    assert done.num_files > 1
    files = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    expected = expected_theirs(ours)
    assert files.keys() == expected.keys()
    assert [name for name in files if not torch.equal(files[name], expected[name])] == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.items() >= own_models.CONFIG.items()

    imported = import_folder(tmp_path / "out", tmp_path / "again", job=own_job("EveryRow"))
    parameters = load_parameters(Run(tmp_path / "again").checkpoint(0))
    assert parameters.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(parameters[name], ours[name])] == []
    assert imported.num_parameters == done.num_parameters == sum(p.numel() for p in own_models.EveryRow().parameters())
    assert imported.job.model.initial_weights == str(tmp_path / "out")


def test_a_dcp_folder_is_of_built_in_models(tmp_path: Path) -> None:
    write_own_run(tmp_path / "run", "EveryRow")
    with pytest.raises(UnsupportedError, match=r"own_models:EveryRow: --format dcp .* only\. --format hf.*load_param"):
        export_dcp(tmp_path / "run", tmp_path / "out")


def test_training_starts_from_the_folder(tmp_path: Path) -> None:
    ours = write_own_run(tmp_path / "run", "EveryRow")
    export(tmp_path / "run", tmp_path / "out")
    job = own_job("EveryRow")
    job = job.replace(model=job.model.replace(initial_weights=str(tmp_path / "out")))
    model = build_model(job.model)
    fill_from_hf(model, job.model, described_for_hf(job, model))
    state = model.state_dict()
    assert all(torch.equal(state[name.removeprefix("buffer.")], tensor) for name, tensor in ours.items())


def test_a_table_is_checked_though_training_does_not_need_it() -> None:
    job = own_job("Changed", {"without": "down"})
    with pytest.raises(ConfigError, match="no row names down: add a Rename"):
        described_for_hf(job, build_model(job.model))
    without = torch.nn.Linear(2, 2)
    assert described_for_hf(job, without) is None
    with pytest.raises(UnsupportedError, match="own_models:Changed has no attribute hugging_face"):
        described_for_hf(job.replace(checkpoint={"export": "float32"}), without)


def test_a_copy_is_dropped_if_it_is_one(tmp_path: Path) -> None:
    ours = write_own_run(tmp_path / "run", "EveryRow")
    export(tmp_path / "run", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    more = {**load_file(path), "head.weight": ours["embedding.weight"].clone(), "layers.0.inv_freq": torch.ones(1)}
    save_file(more, path)
    done = import_folder(tmp_path / "out", tmp_path / "again", job=own_job("EveryRow"))
    assert done.dropped == {"tied": ["head.weight"], "constant": ["layers.0.inv_freq"]}
    more["head.weight"][3, 2] += 1
    save_file(more, path)
    with pytest.raises(ConfigError, match=r"head\.weight differs from embed\.weight"):
        import_folder(tmp_path / "out", tmp_path / "not", job=own_job("EveryRow"))
    assert not (tmp_path / "not").exists()


TWICE = {"rotated.weight": {"theirs": "down_proj.weight"}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor without a row": ({"without": "narrow"}, r"no row names narrow: add a Rename"),
    "a row without a tensor": (
        {"replaced": {"scale": {"ours": "scales"}}},
        r"no row names buffer\.scale: .*Rename\('scales', 'scale'\) names no tensor",
    ),
    "two tensors of one name": ({"replaced": TWICE}, r"down_proj\.weight is the name of down, rotated: give each"),
    "a field of one name alone": (
        {"replaced": {"down_proj.weight": {"theirs": "down.{i}"}}},
        r"Rename\('down', 'down\.\{i\}'\): \{i\} must be in both names",
    ),
    "layers of one name": (
        {"replaced": {"final.{rest}.{i}": {"theirs": "final.{rest}"}}},
        r"Rename\('norms\.\{i\}\.\{rest\}', 'final\.\{rest\}'\): \{i\} must be in both names",
    ),
    "a part twice": (
        {"replaced": {"k.weight": {"our_part": [0, [4, 2, 2], 0]}}},
        r"qkv: of its parts \[0, 1, 2\] there are \[0, 0, 2\]: correct our_part",
    ),
    "parts of other shares": (
        {"replaced": {"k.weight": {"our_part": [1, [4, 2, 1, 1], 0]}}},
        r"qkv: the shares or dims of its parts differ: correct our_part",
    ),
    "shares that do not divide": (
        {"replaced": {"v.weight": {"our_part": [2, [4, 2, 3], 0]}}},
        r"qkv is \[48, 6\], whose dim 0 is not 9 equal shares: correct our_part",
    ),
    "no such dim": (
        {"replaced": {"v.weight": {"our_part": [2, [4, 2, 2], 5]}}},
        r"whose dim 5 is not 8 equal shares",
    ),
    "a vector transposed": (
        {"replaced": {"scale": {"is_transposed": True}}},
        r"buffer\.scale is \[2\], which is no matrix: leave is_transposed out",
    ),
    "another number of heads": (
        {"replaced": {"rotated.weight": {"interleaved_heads": 5}}},
        r"rotated is \[12, 6\], whose rows are not 5 heads of an even size",
    ),
    "a part of no index": (
        {"replaced": {"v.weight": {"our_part": [3, [4, 2, 2], 0]}}},
        r"Part\(index=3.*counted from 0",
    ),
    "both RoPEs": (
        {"replaced": {"rotated.weight": {"our_interleaved_heads": 2}}},
        r"has interleaved_heads and our_interleaved_heads, which exclude each other",
    ),
    "a dropped name that is needed": (
        {"replaced": {"rotated.weight": {"theirs": "rotated.inv_freq"}}},
        r"Drop\('\{rest\}\.inv_freq'\) matches rotated\.inv_freq, the name of rotated",
    ),
    "no model_type": ({"config": {"hidden_size": 6}}, r"config must be a dict .* model_type among them"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_table_is_an_error_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    write_own_run(tmp_path / "run", "EveryRow")
    export(tmp_path / "run", tmp_path / "theirs")
    write_own_run(tmp_path / "wrong", "Changed", options)
    with pytest.raises(ConfigError, match=f"hugging_face of own_models:Changed.*{message}"):
        export(tmp_path / "wrong", tmp_path / "out")
    with pytest.raises(ConfigError, match=f"hugging_face of own_models:Changed.*{message}"):
        import_folder(tmp_path / "theirs", tmp_path / "run-2", job=own_job("Changed", options))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs", "wrong"]


def test_what_is_no_table_is_said(tmp_path: Path) -> None:
    options = {"in_features": 2, "out_features": 3, "bias": False}
    for name, error, message in (
        ("Attribute", ConfigError, r"hugging_face of own_models:Attribute is a NameMap, but must be a .*Format"),
        (
            "Raises",
            ConfigError,
            r"hugging_face of own_models:Raises raised AttributeError: no sizes \(.*own_models\.py",
        ),
    ):
        write_own_run(tmp_path / name, name, options)
        with pytest.raises(error, match=message):
            export(tmp_path / name, tmp_path / "out")
    write_own_run(tmp_path / "counts", "Counts")
    with pytest.raises(UnsupportedError, match=r"persistent buffer count in torch\.int64, .*persistent=False"):
        export(tmp_path / "counts", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"config\['a'\] = \{1\} is no JSON"):
        HuggingFaceFormat(NameMap(()), {"model_type": "llama", "a": {1}})
    with pytest.raises(ConfigError, match=r"NameMap\.renames must be a sequence of Rename, and holds one alone"):
        NameMap(Rename("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"NameMap\.drops must be a sequence of Drop, and holds str"):
        NameMap((), ("a",))  # type: ignore[arg-type]


def test_a_folder_of_other_tensors_is_an_error_that_names_them(tmp_path: Path) -> None:
    write_own_run(tmp_path / "run", "EveryRow")
    export(tmp_path / "run", tmp_path / "out")
    path, job = tmp_path / "out" / "model.safetensors", own_job("EveryRow")
    whole = load_file(path)
    for change, error, message in (
        ({"k.weight": None}, ConfigError, r"1 missing: k\.weight"),
        ({"more": torch.ones(1)}, ConfigError, r"1 unknown: more"),
        ({"k.weight": torch.ones(4, 6)}, ConfigError, r"k\.weight is \[4, 6\], the architecture has \[12, 6\]"),
        ({"k.weight": torch.ones(12, 6).bfloat16()}, CheckpointError, r"the parts of qkv, .* have several dtypes"),
        ({"experts.3.w1.weight": torch.ones(5, 6)}, ConfigError, r"1 unknown: experts\.3\.w1\.weight"),
    ):
        save_file({name: t for name, t in {**whole, **change}.items() if t is not None}, path)
        with pytest.raises(error, match=message):
            import_folder(tmp_path / "out", tmp_path / "again", job=job)
    assert not (tmp_path / "again").exists()


def test_other_values_of_config_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_own_run(tmp_path / "run", "EveryRow")
    export(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "hidden_size": 7, "torch_dtype": "float16"}))
    import_folder(tmp_path / "out", tmp_path / "again", job=own_job("EveryRow"))
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'out'}: the weights were trained with hidden_size = 7, the model has 6"
    ]


def test_a_checkpoint_of_another_class_is_not_exported(tmp_path: Path) -> None:
    write_own_run(tmp_path / "run", "Layers", {"num_layers": 3})
    manifest = Run(tmp_path / "run").manifest
    manifest.write_text(manifest.read_text().replace('"num_layers": 3', '"num_layers": 2'))
    with pytest.raises(CheckpointError, match=r"holds unknown layers\.2\.bias, layers\.2\.weight"):
        export(tmp_path / "run", tmp_path / "out")


def test_a_job_is_for_ones_own_class_and_a_hugging_face_folder(tmp_path: Path) -> None:
    write_own_run(tmp_path / "run", "Layers")
    export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--job imports .* class of your own .*'llama-1m' is none: leave --job out"):
        import_folder(tmp_path / "out", tmp_path / "again", job=own_job("Layers").replace(model={}))
    torch.save({}, tmp_path / "file.pt")
    with pytest.raises(ConfigError, match=r"--job imports a Hugging Face folder .*file\.pt is none"):
        import_folder(tmp_path / "file.pt", tmp_path / "again", config=tmp_path / "out", job=own_job("Layers"))


@pytest.mark.slow
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_layers=st.integers(1, 12),
    prefix=st.text(st.sampled_from("ab.0"), max_size=6).filter(lambda text: not text.startswith(".")),
)
def test_any_prefix_goes_both_ways(tmp_path_factory: pytest.TempPathFactory, num_layers: int, prefix: str) -> None:
    folder, options = tmp_path_factory.mktemp("own"), {"num_layers": num_layers, "prefix": prefix}
    ours = write_own_run(folder / "run", "Layers", options)
    export(folder / "run", folder / "out")
    assert load_file(folder / "out" / "model.safetensors").keys() == {f"{prefix}{name}" for name in ours}
    import_folder(folder / "out", folder / "again", job=own_job("Layers", options))
    again = load_parameters(Run(folder / "again").checkpoint(0))
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.items())


SHARES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


@given(shares=SHARES, unit=st.integers(1, 2), dim=st.integers(0, 1), dropped=st.integers(0, 2))
def test_parts_must_be_all_of_a_tensor(shares: tuple[int, ...], unit: int, dim: int, dropped: int) -> None:
    other = 4
    sizes = [(2 * unit * share, other) if dim == 0 else (other, 2 * unit * share) for share in shares]
    shapes = {f"part{i}": size for i, size in enumerate(sizes)}
    rows = tuple(Rename(f"part{i}", "whole", part=Part(i, shares, dim)) for i in range(len(shares)))
    assert name_map_problems(NameMap(rows), shapes) == []
    if len(rows) > 1:
        left = [i for i in range(len(shares)) if i != dropped % len(shares)]
        some = {f"part{i}": shapes[f"part{i}"] for i in left}
        [problem] = name_map_problems(NameMap(tuple(rows[i] for i in left)), some)
        assert problem.startswith("whole, which part")
        assert f"there are {left}" in problem
        grown = {**shapes, "part0": (sizes[0][0] + shares[0] * (dim == 0), sizes[0][1] + shares[0] * (dim == 1))}
        assert any("their sizes make up" in problem for problem in name_map_problems(NameMap(rows), grown))


def test_a_copy_must_be_of_a_tensor_of_the_model() -> None:
    table = NameMap((Rename("a", "b"),), (Drop("c", "tied", copy_of="d"),))
    [problem] = name_map_problems(table, {"a": (2,)})
    assert problem.startswith("Drop('c'): copy_of = 'd' is no tensor of the model")
