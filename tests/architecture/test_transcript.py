"""The transcript in the README is what the demo shows."""

import importlib.util
import re
from types import ModuleType

from repository import ROOT


def load(name: str) -> ModuleType:
    """Return a Python file of the repository that belongs to no package."""
    spec = importlib.util.spec_from_file_location(name.split("/")[-1], ROOT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


transcript = load("docs/transcript")
demo = load("examples/demo")
TEXT = transcript.TEXT.read_text(encoding="utf-8")


def test_the_picture_is_drawn_from_the_text() -> None:
    assert transcript.PICTURE.read_text(encoding="utf-8") == transcript.draw(TEXT)


def test_the_commands_are_those_of_the_demo() -> None:
    assert re.findall(r"^\$ meshwright (.*)$", TEXT, re.MULTILINE) == list(demo.COMMANDS.values())


def test_the_acts_are_those_of_the_demo() -> None:
    assert re.findall(r"^\d+\. (.*)$", TEXT, re.MULTILINE) == [act.__doc__ for act in demo.ACTS]


def test_each_act_proved_its_point() -> None:
    acts = re.split(r"^\d+\. ", TEXT, flags=re.MULTILINE)[1:]
    assert all("\n✓ " in act for act in acts)
    assert "✗" not in TEXT
