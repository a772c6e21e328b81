"""`meshwright list`: tables that fit 80 columns, JSON that says everything, the user's own entries."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshwright.cli.verbs.list_ import command
from meshwright.spec.machine.device import Device
from meshwright.spec.model.presets import PRESETS

MY_DEVICE = """
title = "My X1"
vendor = "me"
memory_bytes = { value = "80 GB", source = "sheet" }

[sources.sheet]
title = "X1 datasheet"
date = "2026-01"
kind = "datasheet"
"""


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None, result.output
    return result


@pytest.mark.parametrize("kind", ["models", "devices", "clusters"])
def test_tables_fit_80_columns_when_piped(kind: str) -> None:
    lines = run(kind).stdout.splitlines()
    table = lines[: lines.index("")]
    assert max(map(len, table)) <= 80
    assert not any("…" in line for line in table)


@pytest.mark.parametrize("kind", ["models", "devices", "clusters"])
def test_a_narrow_terminal_cuts_no_name_short(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [record["name"] for record in json.loads(run(kind, "--json").stdout)]
    monkeypatch.setenv("COLUMNS", "40")
    text = run(kind).stdout
    assert max(map(len, text.splitlines())) <= 40
    assert set(names) <= set(text.split())


@pytest.mark.parametrize("kind", ["models", "devices", "clusters"])
def test_json_names_what_the_table_names(kind: str) -> None:
    names = [record["name"] for record in json.loads(run(kind, "--json").stdout)]
    table = run(kind).stdout
    assert names
    assert all(f"\n{name} " in table for name in names)


def test_every_preset_is_listed_with_its_parameters() -> None:
    records = {record["name"]: record for record in json.loads(run("models", "--json").stdout)}
    assert set(records) == set(PRESETS)
    # The 8B model's count as its publisher gives it, and 6 FLOPs for each parameter of a matmul as a lower bound.
    assert records["llama3-8b"]["num_parameters"] == 8_030_261_248
    assert records["llama3-8b"]["training_flops_per_token"] > 6 * 7.5e9


def test_json_devices_can_be_read_back() -> None:
    record = next(record for record in json.loads(run("devices", "--json").stdout) if record["name"] == "h100-sxm")
    assert record.pop("file").endswith("h100-sxm.toml")
    assert Device.from_dict(record).peak_flops_per_s("bfloat16") == 989e12


def test_entries_of_the_user_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "x1.toml").write_text(MY_DEVICE)
    monkeypatch.setenv("MESHWRIGHT_CATALOGUE", str(tmp_path))
    mine = [line for line in run("devices").stdout.splitlines() if "yours" in line]
    assert [line.split()[0] for line in mine] == ["x1"]


def test_a_broken_file_is_named_and_the_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "my_rack.toml").write_text("title = ")
    (tmp_path / "clusters" / "rack.toml").write_text("title = ")
    monkeypatch.setenv("MESHWRIGHT_CATALOGUE", str(tmp_path))
    names = {record["name"] for record in json.loads(run("clusters", "--json").stdout)}
    assert "h100-ib400" in names
    assert not names & {"rack", "my_rack"}
    for name in ("rack", "my_rack"):
        assert f"not listed: {tmp_path / 'clusters' / name}.toml" in caplog.text


def test_an_unknown_kind_is_refused() -> None:
    assert CliRunner().invoke(command, ["modules"]).exit_code == 2
