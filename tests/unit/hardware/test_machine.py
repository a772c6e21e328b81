"""What the operating system tells about this machine."""

from pathlib import Path

import pytest

from meshwright.hardware import machine


def test_cores_and_memory_are_positive() -> None:
    assert machine.num_usable_cores() >= 1
    assert machine.usable_memory_bytes() > 2**20


def test_shared_memory_and_disk(tmp_path: Path) -> None:
    assert machine.free_disk_bytes(tmp_path) > 0
    shared = machine.shared_memory_bytes()
    assert shared is None or 0 <= shared[1] <= shared[0]


def test_open_files_limit() -> None:
    limit = machine.max_open_files()
    assert limit is None or limit > 0


def test_operating_system_has_a_name() -> None:
    assert machine.operating_system()


def test_a_compiler_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'example c++ 1.2'\necho more\n")
    compiler.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine.cpp_compiler() == "c++: example c++ 1.2"


def test_no_compiler_is_told_and_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.cpp_compiler() is None
    assert machine.compiler_install_command()


@pytest.mark.parametrize(
    ("text", "is_amd"), [("vendor_id\t: AuthenticAMD\n", True), ("vendor_id\t: GenuineIntel\n", False), ("", False)]
)
def test_the_maker_of_the_processor(
    text: str, *, is_amd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}cpu family\t: 26\n")
    monkeypatch.setattr(machine, "_PROCESSORS", tmp_path / "cpuinfo")
    assert machine.is_amd_processor() is is_amd
