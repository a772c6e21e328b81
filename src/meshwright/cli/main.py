"""`meshwright COMMAND ...`: finds the command's file, runs it, and turns every ending into an exit code.

Nothing here imports more than click, so that --help answers at once; a verb imports what it needs when it is called.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import click

from meshwright import __version__
from meshwright.cli.result_command import HAS_PRINTED, print_json
from meshwright.errors import ExitCode
from meshwright.exits import exit_code_of, leave
from meshwright.log import fitted

VERBS: dict[str, tuple[str, str]] = {
    "check": ("meshwright.cli.verbs.check", "Report everything that is wrong with a job before any process starts."),
    "show": ("meshwright.cli.verbs.show", "Show a job's every value, where it came from and what it means."),
    "plan": ("meshwright.cli.verbs.plan", "Find the best layout for a job or a model on a cluster, and explain it."),
    "simulate": (
        "meshwright.cli.verbs.simulate",
        "Simulate a step of a job on all of its ranks, without a device.",
    ),
    "backtest": ("meshwright.cli.verbs.backtest", "Predict measured runs and report the errors."),
    "init": ("meshwright.cli.verbs.init", "Write a commented job file for a named model."),
    "list": ("meshwright.cli.verbs.list_", "List the models, devices or clusters that are known by name."),
    "prove": ("meshwright.cli.verbs.prove", "Prove that layouts train what one process trains."),
    "precompile": ("meshwright.cli.verbs.precompile", "Compile a job's blocks ahead of training."),
    "train": ("meshwright.cli.verbs.train", "Train a job, or go on with a run that stopped."),
    "join": ("meshwright.cli.verbs.join", "Add a replica to a run that trains."),
    "chaos": ("meshwright.cli.verbs.chaos", "Train a job under faults, which must end as without them."),
    "profile": ("meshwright.cli.verbs.reports.profile", "Show where a job's steps go, from a few profiled ones."),
    "compare": ("meshwright.cli.verbs.reports.compare", "Show where two steps differ, simulated or measured."),
    "report": ("meshwright.cli.verbs.reports.report", "Show where the steps of a run went, predicted and measured."),
    "diagnose": (
        "meshwright.cli.verbs.reports.diagnose",
        "Find why a run hangs: which rank did not reach which collective.",
    ),
    "data": ("meshwright.cli.verbs.data", "Prepare the data of a job ahead of training, and examine it."),
    "checkpoint": (
        "meshwright.cli.verbs.conversion.checkpoint",
        "List, verify, compare, clean up or rewrite checkpoints.",
    ),
    "generate": ("meshwright.cli.verbs.conversion.generate", "Continue a text with a trained model."),
    "export": ("meshwright.cli.verbs.conversion.export", "Write a checkpoint as a Hugging Face folder."),
    "import": (
        "meshwright.cli.verbs.conversion.import_",
        "Turn a Hugging Face folder into a checkpoint to train from.",
    ),
    "calibrate": ("meshwright.cli.verbs.calibrate", "Measure this machine for the planner."),
    "doctor": ("meshwright.cli.verbs.doctor", "Report what this machine has, what is missing and how to get it."),
}
"""Each verb's module, whose `command` is a click command, and its line in --help; in the order of a first visit."""

COMPLETION_VARIABLE = "_MESHWRIGHT_COMPLETE"
"""What a shell sets to ask for its script (bash_source) or for completions (bash_complete); likewise zsh and fish."""


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
        """Return the command that the arguments name; raises UsageError that says which command was meant."""
        if args[0] not in VERBS and not args[0].startswith("-"):
            close = get_close_matches(args[0], VERBS, n=1)
            advice = f"did you mean {close[0]}?" if close else f"commands are {', '.join(VERBS)}"
            raise click.UsageError(f"unknown command {args[0]!r}: {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's lines: click's own way would import every verb for its help."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(
    cls=VerbGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="COMMAND ...",
    epilog="Exit codes: 0 done, 2 bad input, 70 do not retry, 75 retry with --resume, 130 interrupted.",
)
@click.version_option(__version__, prog_name="meshwright", message="%(prog)s %(version)s")
def group() -> None:
    """Plan, prove and run the training of large models on PyTorch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (sys.argv without `arguments`) and exit with the code that says how it went."""
    leave(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Return the exit code of one command line, having shown what went wrong on stderr."""
    return exit_code_of(lambda: _invoke(arguments))


def _invoke(arguments: Sequence[str]) -> int:
    if COMPLETION_VARIABLE in os.environ:
        from meshwright.cli.completion import answer_shell

        return answer_shell(group, COMPLETION_VARIABLE)
    try:
        with group.make_context("meshwright", list(arguments)) as context:
            group.invoke(context)
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.ClickException as error:
        message = " ".join(error.format_message().split())  # click lists choices in lines of their own
        _print_error(arguments, message)
        return _show_usage(error, message)
    except Exception as error:
        if not context.meta.get(HAS_PRINTED):
            _print_error(arguments, str(error), getattr(error, "listed", ()))
        raise
    return ExitCode.DONE


def _print_error(arguments: Sequence[str], message: str, problems: Sequence[str] = ()) -> None:
    """Print with --json what went wrong, in place of the result."""
    if "--json" in arguments and os.environ.get("RANK", "0") == "0":
        print_json({"error": message, "problems": [*problems] or [message]})


def _show_usage(error: click.ClickException, message: str) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return ExitCode.BAD_INPUT
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(f"{error.ctx.get_usage()}\n", err=True)
    click.echo(fitted(f"error: {message}"), err=True)
    return ExitCode.BAD_INPUT
