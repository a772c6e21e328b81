"""`meshwright data ...`: prepare the data of a job ahead of training, and examine it."""

import sys
from pathlib import Path

import click

from meshwright.cli.completion import job_words
from meshwright.cli.result_command import print_result, result_command
from meshwright.cli.subcommands import Subcommands
from meshwright.errors import ExitCode

_job_file = click.argument("job_file", type=click.Path())
_overrides = click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=job_words)


@click.group(cls=Subcommands, subcommand_metavar="COMMAND ...")
def command() -> None:
    """Prepare the data of a job ahead of training, and examine it."""


@result_command
@_job_file
@_overrides
@click.option("--shard", metavar="I/N", help="Make every N-th part only, from part I on (0 to N - 1).")
@click.option("--out", metavar="FOLDER", type=click.Path(path_type=Path), help="Also write all tokens to a new folder.")
def _prepare(job_file: str, overrides: tuple[str, ...], shard: str | None, out: Path | None, as_json: bool) -> None:
    """Tokenise the data of the job in JOB_FILE into data.cache_dir, where training finds it.

    A call that is killed loses the part in work only: the next one continues. With --shard, processes or machines that
    share data.cache_dir each make some of the parts, and a last call without it joins them.

    What --out writes needs neither the text nor the tokenizers library: data.source=FOLDER data.tokenizer=FOLDER.
    """
    from meshwright.app.data.prepare import prepare

    print_result(prepare(job_file, *overrides, shard=shard, out=out), as_json)


@result_command
@_job_file
@_overrides
def _stats(job_file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show how much data the job in JOB_FILE has, how long its documents are, and how often its steps read it.

    Tokenises what is not in data.cache_dir yet, as training would. Speeds are measured now, on this machine.
    """
    from meshwright.app.data.stats import stats

    print_result(stats(job_file, *overrides), as_json)


@result_command
@_job_file
@_overrides
@click.option("--step", type=click.IntRange(min=1), help="Show the samples of this step of the log; default: 1.")
@click.option("--sample", type=click.IntRange(min=0), help="Show the samples from this number on.")
@click.option("--count", type=click.IntRange(min=1), default=2, show_default=True, help="Samples to show.")
def _preview(
    job_file: str, overrides: tuple[str, ...], step: int | None, sample: int | None, count: int, as_json: bool
) -> None:
    """Show samples of the job in JOB_FILE as text: what is learned, where documents end, which files they are of.

    Of a class of your own, the shapes of its samples.
    """
    from meshwright.app.data.preview import preview

    print_result(preview(job_file, *overrides, step=step, sample=sample, count=count), as_json)


@result_command
@_job_file
@_overrides
@click.option("--samples", type=click.IntRange(min=1), default=100, show_default=True, help="Samples to read twice.")
def _verify(job_file: str, overrides: tuple[str, ...], samples: int, as_json: bool) -> None:
    """Read all data of the job in JOB_FILE, up to data.max_bytes, and name each file and record that is corrupt.

    Compares the token cache with its checksums, and reads some samples twice. Exit code 0: valid; 2: not.
    """
    from meshwright.app.data.verify_data import verify

    found = verify(job_file, *overrides, samples=samples)
    print_result(found, as_json)
    if not found.is_valid:
        sys.exit(ExitCode.BAD_INPUT)


_VERBS = {"prepare": _prepare, "stats": _stats, "preview": _preview, "verify": _verify}
for _name, _command in _VERBS.items():
    command.add_command(_command, _name)
