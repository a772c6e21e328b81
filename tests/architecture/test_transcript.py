"""The transcripts in README and documentation are of the commands that they name."""

import re

from repository import ROOT, load_module

transcript = load_module("docs/transcript")
demo = load_module("examples/demo")
fine_tuning = load_module("docs/fine_tuning_page")
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


def test_the_commands_of_the_fine_tuning_run_are_those_of_its_program() -> None:
    page = (ROOT / fine_tuning.PAGE).read_text(encoding="utf-8")
    assert re.findall(r"^\$ meshwright (.*)$", page, re.MULTILINE) == [command for _, command in fine_tuning.STEPS]
    assert page.count("logits equal those of transformers") == 2
