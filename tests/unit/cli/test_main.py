"""The command line's endings: each error its message, each ending its exit code; --help loads next to nothing."""

import importlib
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import click
import pytest

from meshwright import __version__, errors
from meshwright.cli.main import VERBS, run


def fake_verb(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Let `meshwright check` do `action`."""
    module = ModuleType("fake_verb")
    module.command = click.Command("check", callback=action)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setitem(VERBS, "check", ("fake_verb", "A stand-in."))


def raising(error: BaseException) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.ConfigError("no such key"), 2, "error: no such key\n"),
        (errors.UnsupportedError("no such device"), 2, "error: no such device\n"),
        (errors.DataError("no text"), 2, "error: no text\n"),
        (errors.CheckpointError("torn"), 70, "error: torn\n"),
        (errors.NonFiniteError("nan"), 70, "error: nan\n"),
        (errors.MeshwrightError("broken"), 70, "error: broken\n"),
        (errors.LostPeer("rank 1"), 75, "error: rank 1\n"),
        (errors.Preempted("asked to stop"), 75, "error: asked to stop\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.exceptions.Exit(3), 3, ""),
        (click.Abort(), 130, "interrupted\n"),
        (click.FileError("job.toml", "locked"), 2, "error: Could not open file 'job.toml': locked\n"),
        (ModuleNotFoundError("", name="torch"), 2, "error: this command needs torch: pip install '.[train]'\n"),
        (ModuleNotFoundError("", name="safetensors"), 2,
         "error: this command needs safetensors: pip install '.[train]'\n"),
        (ModuleNotFoundError("", name="transformers"), 2,
         "error: this command needs transformers: pip install '.[hf]'\n"),
    ],
)  # fmt: skip
def test_each_error_has_one_message_and_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    fake_verb(monkeypatch, raising(error))
    assert run(["check"]) == code
    assert capsys.readouterr() == ("", message)


def test_of_ranks_the_launcher_alone_says_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verb(monkeypatch, raising(KeyboardInterrupt()))
    monkeypatch.setenv("RANK", "1")
    assert run(["check"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("surprise"),
        ModuleNotFoundError("x", name="torch.surprise"),
        AssertionError("surprise"),
        BrokenPipeError("of a pipe that is not stdout"),
    ],
)
def test_a_bug_shows_its_traceback_and_ends_with_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    fake_verb(monkeypatch, raising(error))
    assert run(["check"]) == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last)")
    assert f"{type(error).__name__}: {error}" in shown
    assert shown.splitlines()[-1].startswith("error: this is a bug in Meshwright")


def test_a_verb_that_ends_well_ends_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_verb(monkeypatch, lambda: click.echo("done"))
    assert run(["check"]) == 0
    assert capsys.readouterr().out == "done\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chekc"], "error: unknown command 'chekc': did you mean check?"),
        (["zzz"], f"error: unknown command 'zzz': commands are {', '.join(VERBS)}"),
        (["--nonsense"], "error: No such option"),
        (["check"], "error: Missing argument 'JOB_FILE'"),
        (["list"], "error: Missing argument '{models|devices|clusters}'. Choose from: models, devices, clusters"),
        (["check", "job.toml", "--ranks", "x"], "error: Invalid value for '--ranks'"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.splitlines()[0].startswith("Usage: meshwright")
    assert shown.splitlines()[-1].startswith(message)


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"meshwright {__version__}\n"
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines[lines.index("Commands:") + 1 :] if line[:3].strip()]
    assert listed[: len(VERBS)] == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_command_that_explains_itself(verb: str) -> None:
    if verb in ("train", "generate", "export", "import"):
        pytest.importorskip("torch")
    command = importlib.import_module(VERBS[verb][0]).command
    assert isinstance(command, click.Command)
    assert command.help


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600).stdout


def test_help_imports_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "pydantic", "rich", "tomlkit", "asyncio"]
    printed = python(
        "import sys\nfrom meshwright.cli.main import run\ncode = run(['--help'])\n"
        f"print(code, [name for name in {heavy} if name in sys.modules])"
    )
    assert printed.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("write", ["click.echo", "rich.console.Console(file=sys.stdout).print"])
def test_a_reader_that_goes_away_is_no_error(write: str) -> None:
    writer = (
        "import sys\nfrom meshwright.cli.main import main\n"
        "import meshwright.cli.main as m, types, click, rich.console\n"
        "verb = types.ModuleType('verb')\n"
        f"verb.command = click.Command('check', callback=lambda: [{write}('x' * 100) for _ in range(10_000)])\n"
        "sys.modules['verb'] = verb\nm.VERBS['check'] = ('verb', '')\nmain(['check'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", writer], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    shown = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=600), shown) == (141, b"")


def test_an_interrupt_while_the_command_line_is_imported_leaves_no_traceback() -> None:
    script = (
        # A shell starts background commands with SIGINT ignored.
        "import importlib, os, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import meshwright.__main__ as entry;"
        "importlib.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT); entry.main()"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (-signal.SIGINT, "")


def test_a_signal_after_the_end_of_a_command_changes_no_exit_code() -> None:
    script = (
        "import atexit, importlib, os, signal, types; import meshwright.__main__ as entry;"
        "signal.signal(signal.SIGTERM, lambda *_: 1 / 0);"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM));"
        "importlib.import_module = lambda name: types.SimpleNamespace(main=lambda: exit(3)); entry.main()"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (3, "")
