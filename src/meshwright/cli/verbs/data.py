"""`meshwright data ...`: prepare the data of a job ahead of training, and examine it."""

import click

from meshwright.cli.completion import job_words
from meshwright.cli.noun_group import NounGroup
from meshwright.cli.result_command import print_result, result_command

_job_file = click.argument("job_file", type=click.Path())
_overrides = click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=job_words)


@click.group(cls=NounGroup, subcommand_metavar="COMMAND ...")
def command() -> None:
    """Prepare the data of a job ahead of training, and examine it."""


@result_command
@_job_file
@_overrides
@click.option("--shard", metavar="I/N", help="Make every N-th part only, from part I on (0 to N - 1).")
def _prepare(job_file: str, overrides: tuple[str, ...], shard: str | None, as_json: bool) -> None:
    """Tokenise the data of the job in JOB_FILE into data.cache_dir, where training finds it.

    A call that is killed loses the part in work only: the next one goes on. With --shard, processes or machines that
    share data.cache_dir each make some of the parts, and a last call without it joins them.
    """
    from meshwright.app.data.prepare import prepare

    print_result(prepare(job_file, *overrides, shard=shard), as_json)


_VERBS = {"prepare": _prepare}
for _name, _command in _VERBS.items():
    command.add_command(_command, _name)
