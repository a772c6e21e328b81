"""What a package index shows of the project holds without the repository."""

from __future__ import annotations

import re
import sys
import tomllib
from types import ModuleType

import pytest

from repository import ROOT, load_module


def load_hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return hatch_build.py as a module, with a name in place of hatchling, which only a build installs."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    return load_module("hatch_build")


def test_the_readme_of_an_index_has_no_relative_link_and_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = load_hook(monkeypatch).index_readme(text)
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert all(link.startswith("https://") for link in links)
    assert "![" not in shown
    assert "Status, with figures (`docs/STATUS.md`)" in shown
    assert shown.count("\n## ") == text.count("\n## ")


def test_the_metadata_names_authors_classifiers_and_no_invented_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["authors"]
    assert "Typing :: Typed" in project["classifiers"]
    assert not [name for name in project["classifiers"] if name.startswith("License ::")]  # license is an expression
    assert "urls" not in project
