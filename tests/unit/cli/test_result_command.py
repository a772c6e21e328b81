"""What all commands share: --json, --quiet, --verbose, NO_COLOR, COLUMNS, and refusals before torch is imported."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from meshwright.cli.main import VERBS, group, run
from meshwright.cli.result_command import result_command
from questions import SMALL_PLAN
from repository import ROOT

TINY = str(ROOT / "examples" / "tiny.toml")
PLAN = ["plan", "--model", "llama3.2-1b", "--cluster", "h100-ib400:1", "--seq-len", "2048", "--global-batch-size", "8"]
"""What is shared hangs on no size of a plan."""
SHARED = {"--json", "-q", "--quiet", "-v", "--verbose"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_the_shared_options(verb: str) -> None:
    with group.make_context("meshwright", [], resilient_parsing=True) as context:
        command = group.get_command(context, verb)
    assert command is not None
    for one in command.commands.values() if isinstance(command, click.Group) else [command]:
        options = [name for parameter in one.params for name in parameter.opts]
        assert set(options) >= SHARED
        assert len(options) == len(set(options))


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "clusters"],
        ["show", TINY],
        ["check", TINY],
        ["check", TINY, "--ranks", "3"],
        ["init", "llama-1m", "--out", "job.toml"],
        PLAN,
        ["doctor"],
    ],
    ids=lambda arguments: " ".join(arguments[:1]),
)
def test_json_is_alone_on_standard_output(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)


def test_check_says_what_is_wrong_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", TINY, "train.steps=0", "--json"]) == 2
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert not found["is_valid"]
    assert captured.err == f"error: {found['error']}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", TINY, "train.steps=0", "train.seq_len=0"],
        ["plan", "--model", "llama3-8b", "--cluster", "h100:8", "layout.tpp=2"],
        ["show", "nope.toml"],
        ["report", "nope"],
        ["list", "nope"],
        ["nope"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_fails_prints_its_problems_as_json(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--json"]) == 2
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err.endswith(f"error: {found['error']}\n")
    assert all(problem in found["error"] for problem in found["problems"])
    assert len(found["problems"]) == (2 if arguments[0] in ("check", "plan") else 1)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "is_shown"), [((), True), (("-q",), False), (("--quiet",), False)])
def test_quiet_prints_no_progress(
    option: tuple[str, ...], is_shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[train]\nglobal_batch_size = 8\n[cluster]\nname = "h100-ib400"\nnum_devices = 8\n')
    assert run(["plan", str(job), "--write", *option]) == 0
    captured = capsys.readouterr()
    assert captured.err == (f"the layout is now in {job}\n" if is_shown else "")
    assert "pick" in captured.out


@pytest.mark.slow
@pytest.mark.parametrize(("option", "is_shown"), [((), True), (("-q",), False)])
def test_a_notice_is_wrapped_and_quiet_leaves_it_out(option: tuple[str, ...], is_shown: bool) -> None:
    command = [sys.executable, "-m", "meshwright", "plan", TINY, *option]
    shown = subprocess.run(
        command, env=os.environ | {"COLUMNS": "60"}, capture_output=True, text=True, check=False
    ).stderr
    assert ("is not calibrated" in " ".join(shown.split())) == is_shown
    assert max(map(len, shown.splitlines()), default=0) <= 60


def test_a_command_says_the_same_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    @result_command
    def command(as_json: bool) -> None:
        for _ in range(2):
            assert logging.lastResort is not None
            logging.lastResort.handle(logging.makeLogRecord({"msg": "as an example", "levelno": logging.WARNING}))

    for _ in range(2):
        command([], standalone_mode=False)
        assert capsys.readouterr().err == "as an example\n"


def test_verbose_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "nope.toml"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert run(["show", "nope.toml", "-v"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("DEBUG")
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("error: there is no job file")


PAGES = [PLAN, ["list", "models"], ["show", TINY], ["doctor"]]


@pytest.mark.parametrize("arguments", PAGES, ids=lambda arguments: arguments[0])
def test_no_color_turns_colors_off(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    run(arguments)
    codes = re.findall(r"\x1b\[([\d;]*)m", capsys.readouterr().out)
    # Bold and dim are no colors.
    assert not [code for code in codes if re.search(r"(^|;)(3|4|9|10)\d", code)]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[*SMALL_PLAN], ["show", TINY]], ids=lambda arguments: arguments[0])
@pytest.mark.parametrize("width", [70, 200])
def test_columns_sets_the_width(
    arguments: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(arguments) == 0
    assert width - 40 < max(map(len, capsys.readouterr().out.splitlines())) <= width


BAD_INPUT = (
    ["train", "nope"],
    ["train", TINY, "train.bad=1"],
    ["train", TINY, "--ranks", "3"],
    ["simulate", "nope"],
    ["simulate", TINY, "--routing", "nope"],
    ["generate", "nope"],
    ["generate", "nope", "--top-p", "2"],
    ["export", "nope", "out"],
    ["import", "nope", "out"],
    ["prove", "nope"],
    ["prove", TINY, "nope=3"],
    ["calibrate", "--bad"],
    ["calibrate", "--name", "NO NAME"],
    ["report", "nope"],
    ["compare", "nope", "nope"],
    ["diagnose", "nope"],
)
IN_FORKS = """
import json, os, sys
from meshwright.cli.main import run
for number, arguments in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if not pid:
        sys.stdout, sys.stderr = open(f"{number}.out", "w"), open(f"{number}.err", "w")
        print(int(run(arguments)), "torch" in sys.modules)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what each bad input prints, each in a fork of one new Python that has the command line."""
    folder = tmp_path_factory.mktemp("refusals")
    subprocess.run([sys.executable, "-c", IN_FORKS, json.dumps(BAD_INPUT)], check=True, cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BAD_INPUT)), ids=[" ".join(words) for words in BAD_INPUT])
def test_bad_input_is_refused_before_torch_is_imported(number: int, refusals: Path) -> None:
    printed, said = ((refusals / f"{number}.{end}").read_text() for end in ("out", "err"))
    assert printed.split() == ["2", "False"], said
    assert said.splitlines()[-1].startswith("error: ")


def test_help_names_the_shared_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "--help"]) == 0
    assert set(re.findall(r"--?\w+", capsys.readouterr().out)) >= SHARED
    assert isinstance(group, click.Group)
