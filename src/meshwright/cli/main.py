"""`meshwright VERB ...`: finds the verb's file, runs it, and turns every ending into an exit code.

Nothing here imports more than click, so that --help answers at once; a verb imports what it needs when it is called.
"""

import importlib
import os
import select
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches

import click

from meshwright import __version__
from meshwright.errors import ExitCode, MeshwrightError
from meshwright.extras import EXTRA_OF_PACKAGE

VERBS: dict[str, tuple[str, str]] = {
    "check": ("meshwright.cli.verbs.check", "Tell everything that is wrong with a job before any process starts."),
    "show": ("meshwright.cli.verbs.show", "Show a job's every value, where it came from and what it means."),
    "plan": ("meshwright.cli.verbs.plan", "Find the best layout for a job or a model on a cluster, and tell why."),
    "simulate": (
        "meshwright.cli.verbs.simulate",
        "Run a job's step dry, for all of its ranks, and tell what it would do.",
    ),
    "backtest": ("meshwright.cli.verbs.backtest", "Predict measured runs and tell how far off that is."),
    "init": ("meshwright.cli.verbs.init", "Write a commented job file for a named model."),
    "list": ("meshwright.cli.verbs.list_", "List the models, devices or clusters that are known by name."),
    "prove": ("meshwright.cli.verbs.prove", "Prove that layouts train what one process trains."),
    "train": ("meshwright.cli.verbs.train", "Train a job, or go on with a run that stopped."),
    "compare": ("meshwright.cli.verbs.compare", "Show where two steps differ, simulated or measured."),
    "report": ("meshwright.cli.verbs.report", "Show where the steps of a run went, expected and measured."),
    "diagnose": (
        "meshwright.cli.verbs.diagnose",
        "Tell why a run stands still: which rank did not reach which collective.",
    ),
    "generate": ("meshwright.cli.verbs.generate", "Continue a text with a trained model."),
    "export": ("meshwright.cli.verbs.export", "Write a checkpoint as a Hugging Face folder."),
    "import": ("meshwright.cli.verbs.import_", "Turn a Hugging Face folder into a checkpoint to train from."),
    "calibrate": ("meshwright.cli.verbs.calibrate", "Measure this machine for the planner."),
    "doctor": ("meshwright.cli.verbs.doctor", "Tell what this machine has, what is missing and how to get it."),
}
"""Each verb's module, whose `command` is a click command, and its line in --help; in the order of a first visit."""

# The shell's own code for a process whose reader went away: 128 + SIGPIPE.
_READER_GONE = 141


class VerbGroup(click.Group):
    """A group that knows its verbs by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the table's order."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the verb's command, None for an unknown verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; raises UsageError that says which verb was meant."""
        if args[0] not in VERBS and not args[0].startswith("-"):
            close = get_close_matches(args[0], VERBS, n=1)
            advice = f"did you mean {close[0]}?" if close else f"commands are {', '.join(VERBS)}"
            raise click.UsageError(f"{args[0]!r} is no command: {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's lines: click's own way would import every verb for its help."""
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="VERB ...",
    epilog="Exit codes: 0 done, 2 bad input, 70 do not retry, 75 retry with --resume, 130 interrupted.",
)
@click.version_option(__version__, prog_name="meshwright", message="%(prog)s %(version)s")
def group() -> None:
    """Plan, prove and run the training of large models on PyTorch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (sys.argv without `arguments`) and exit with the code that says how it went."""
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code == ExitCode.INTERRUPTED or (code and "RANK" in os.environ):
        # An interrupt inside exec(), which dataclasses use, makes CPython die of SIGINT after an orderly exit (3.11).
        # A rank that failed cannot leave its process group in good order, and about one in four then dies of SIGABRT
        # in the group's threads (torch 2.13). Either way the code would be lost.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Return the exit code of one command line, having shown what went wrong on stderr."""
    try:
        with group.make_context("meshwright", list(arguments)) as context:
            group.invoke(context)
        sys.stdout.flush()
    except BrokenPipeError as error:
        return _READER_GONE if _has_lost_its_reader() else _show(error)
    except SystemExit as ending:
        # rich, which draws the tables, ends with 1 when its reader goes away.
        if isinstance(ending.__context__, BrokenPipeError):
            return _READER_GONE
        raise
    except (KeyboardInterrupt, click.Abort):
        # Of a rank, its launcher says so: once for all of them.
        if "RANK" not in os.environ:
            click.echo("interrupted", err=True)
        return ExitCode.INTERRUPTED
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.ClickException as error:
        return _show_usage(error)
    except Exception as error:
        return _show(error)
    return ExitCode.DONE


def _has_lost_its_reader() -> bool:
    """Return whether stdout is the pipe that broke; it then leads nowhere, since Python flushes it again at exit."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        is_broken = any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, AttributeError):
        return False  # stdout is no pipe, or this system cannot tell
    if is_broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_broken


def _show_usage(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return ExitCode.BAD_INPUT
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(f"{error.ctx.get_usage()}\n", err=True)
    click.echo(f"error: {error.format_message()}", err=True)
    return ExitCode.BAD_INPUT


def _show(error: Exception) -> int:
    if isinstance(error, MeshwrightError):
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRA_OF_PACKAGE:
        extra = EXTRA_OF_PACKAGE[error.name]
        click.echo(f"error: this verb needs {error.name}: pip install '.[{extra}]'", err=True)
        return ExitCode.BAD_INPUT
    traceback.print_exception(error)
    click.echo("error: this is a bug in Meshwright, or in code that the job names (see above)", err=True)
    return ExitCode.DO_NOT_RETRY
