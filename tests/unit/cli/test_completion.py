"""Shell completion: what a shell is answered for the words of a command line, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from meshwright.cli.main import COMPLETION_VARIABLE, VERBS, run


def completions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return what Bash is offered in place of the last of `words`; files are named by their type."""
    monkeypatch.setenv(COMPLETION_VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["meshwright", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert run([]) == 0
    lines = (line.partition(",") for line in capsys.readouterr().out.split())
    return [value if kind == "plain" else f"({kind})" for kind, _, value in lines]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["plan", "--clu"], ["--cluster"]),
        (["prove", "job.toml", "--device", "c"], ["cpu", "cuda"]),
        (["list", "mod"], ["models"]),
        (["train", "jo"], ["(file)"]),
        (["train", "job.toml", "lay"], ["layout."]),
        (["train", "job.toml", "layout.cp_m"], ["layout.cp_method="]),
        (["plan", "lay"], ["(file)", "layout."]),
        (["plan", "layout.cp_m"], ["layout.cp_method="]),
        # Bash makes three words of a key, the sign and a value.
        (["check", "job.toml", "layout.cp_method", "=", "r"], ["ring"]),
        (["check", "job.toml", "layout.compile", "="], ["true", "false"]),
        (["check", "job.toml", "layout.compile=t"], ["layout.compile=true"]),
        (["check", "job.toml", "layout.tp", "=", "r"], []),
        (["init", "llama3-70"], ["(file)", "llama3-70b"]),
        (["plan", "--model", "llama3-70"], ["(file)", "llama3-70b"]),
        (["plan", "--cluster", "h100-ib4"], ["h100-ib400"]),
    ],
)
def test_words_are_completed(
    words: list[str], offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completions(monkeypatch, capsys, *words) == offered


def test_every_command_is_offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert completions(monkeypatch, capsys, "") == list(VERBS)


def python(variables: dict[str, str]) -> str:
    """Return what a process prints that is asked by a shell, and whether it loaded torch."""
    code = "import sys\nfrom meshwright.cli.main import run\nrun([])\nprint({'torch', 'rich'} & sys.modules.keys())"
    environment = os.environ | variables
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout


@pytest.mark.parametrize("words", ["meshwright plan layout.t", "meshwright generate --", "meshwright plan --cluster h"])
def test_a_completion_loads_little(words: str) -> None:
    variables = {COMPLETION_VARIABLE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    *offered, loaded = python(variables).splitlines()
    assert offered
    assert loaded == "set()"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(COMPLETION_VARIABLE, f"{shell}_source")
    assert run([]) == 0
    script = capsys.readouterr().out
    assert f"{COMPLETION_VARIABLE}={shell}_complete" in script
    program = shutil.which(shell)
    if program is not None:
        assert subprocess.run([program, "-n"], input=script, text=True, check=False).returncode == 0
