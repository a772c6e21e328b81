"""`meshwright doctor` with and without torch, with GPUs that are known and not, and what it exits with."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshwright.app.doctor import TORCH_SERIES
from meshwright.cli.verbs.doctor import command
from repository import ROOT

PYPROJECT = ROOT / "pyproject.toml"
REAL_VERSION = metadata.version


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {finding["what"]: finding for finding in json.loads(result.stdout)["findings"]}


def install(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that packages have these versions, None for not installed; the others are as they are."""

    def version(package: str) -> str:
        if package not in versions:
            return REAL_VERSION(package)
        found = versions[package]
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(metadata, "version", version)


def pretend_torch(monkeypatch: pytest.MonkeyPatch, *device_names: str, has_gloo: bool = True) -> None:
    properties = [SimpleNamespace(name=name, total_memory=80 * 2**30) for name in device_names]
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda="13.0", hip=None),
        cuda=SimpleNamespace(
            is_available=lambda: bool(device_names),
            device_count=lambda: len(device_names),
            get_device_properties=lambda index: properties[index],
            nccl=SimpleNamespace(version=lambda: (2, 28, 3)),
        ),
        distributed=SimpleNamespace(
            is_available=lambda: True, is_gloo_available=lambda: has_gloo, is_nccl_available=lambda: True
        ),
    )
    install(monkeypatch, torch="2.13.0")
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_this_machine_can_train() -> None:
    result = doctor("--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["can_train"] is True
    found = findings(result)
    assert found["torch"]["found"].startswith(metadata.version("torch"))
    assert found["gloo"]["state"] == "ok"
    assert {"system", "Python", "cores", "memory", "free disk", "C++ compiler", "NVIDIA driver"} <= set(found)


def test_the_light_install_is_no_error_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch=None, safetensors=None)
    result = doctor()
    assert result.exit_code == 0
    assert "pip install '.[train]'" in result.stdout
    assert "torch, safetensors:" in result.stdout
    assert "Training cannot run here yet." in result.stdout


@pytest.mark.parametrize("installed", ["2.10.1", "2.16.0", "3.0.0"])
def test_an_unsupported_torch_is_broken(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    install(monkeypatch, torch=installed)
    result = doctor("--json")
    assert result.exit_code == 70
    assert findings(result)["torch"]["state"] == "broken"
    assert "2.11 to 2.15" in findings(result)["torch"]["found"]


def test_a_torch_that_cannot_be_imported_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.13.0")
    monkeypatch.setitem(sys.modules, "torch", None)
    result = doctor()
    assert result.exit_code == 70
    assert "cannot be imported" in result.stdout
    assert "pip install --force-reinstall" in result.stdout


def test_a_torch_without_gloo_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, has_gloo=False)
    assert doctor().exit_code == 70


def test_known_and_unknown_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, "NVIDIA H100 80GB HBM3", "NVIDIA X1", "Tesla V100-SXM2-16GB")
    result = doctor("--json")
    found = findings(result)
    assert result.exit_code == 0
    assert found["NCCL"]["found"] == "2.28.3"
    assert "h100-sxm, 989TFLOP/s bfloat16" in found["cuda:0"]["found"]
    assert found["cuda:1"]["state"] == "missing"
    assert "unknown" in found["cuda:1"]["found"]
    assert "no bfloat16 peak known" in found["cuda:2"]["found"]


def test_every_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, pyarrow=None, wandb=None, transformers=None)
    result = doctor("--json")
    found = findings(result)
    assert result.exit_code == 0
    assert found["pyarrow"]["remedy"] == "pip install '.[parquet]'"
    assert found["wandb"]["remedy"] == "pip install '.[wandb]'"
    assert found["transformers"]["remedy"] == "pip install '.[hf]'"


def test_supported_series_are_those_of_the_package() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    requirement = next(line for line in extras["train"] if line.startswith("torch"))
    match = re.fullmatch(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", requirement)
    assert match is not None
    oldest_major, oldest_minor, above_major, above_minor = map(int, match.groups())
    assert ((oldest_major, oldest_minor), (above_major, above_minor - 1)) == TORCH_SERIES


def test_the_report_has_no_line_that_ends_in_blanks() -> None:
    assert not [line for line in doctor().stdout.splitlines() if line != line.rstrip()]


def test_importing_the_verb_imports_no_torch() -> None:
    code = "import sys, meshwright.app.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_settings_of_torch_s_allocator_are_explained_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    found = findings(doctor("--json"))
    assert found["expandable_segments"]["found"].startswith("True, set by `meshwright train`: a segment grows")
    assert {"fragmentation", "max_split_size_mb", "garbage_collection_threshold", "to change one"} <= set(found)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    changed = findings(doctor("--json"))
    assert changed["expandable_segments"]["found"].startswith("False, torch's default")
    assert changed["advice"]["remedy"] == "unset PYTORCH_ALLOC_CONF"


def test_a_gpu_says_which_memory_pools_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("meshwright.memory.capabilities.device_attribute", lambda _, attribute: int(attribute == 89))
    text = doctor().stdout.replace("\n", " ")
    assert "managed memory: yes: " in text
    assert "NCCL's allocator: no: the device has no multicast" in " ".join(text.split())
    assert "extended memory: no: " in text


def test_a_rank_without_torchruns_variables_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    found = subprocess.run([sys.executable, "-m", "meshwright", "doctor"], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "no MASTER_ADDR" in found.stderr
    assert "unset RANK to check this machine alone" in found.stderr
