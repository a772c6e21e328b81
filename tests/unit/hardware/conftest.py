"""Entries of a catalogue of the user's own."""

from pathlib import Path

import pytest

from meshwright.hardware.catalogue import CATALOGUE_VARIABLE


@pytest.fixture(autouse=True)
def mine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty catalogue of the user's own, so that no test sees this machine's."""
    folder = tmp_path_factory.mktemp("mine")
    for kind in ("devices", "clusters"):
        (folder / kind).mkdir()
    monkeypatch.setenv(CATALOGUE_VARIABLE, str(folder))
    return folder
