"""`meshwright join`: adds a replica to a run that trains."""

import json
import sys

import click

from meshwright.cli.result_command import print_json, result_command


@result_command
@click.argument("run", type=click.Path())
def command(run: str, as_json: bool) -> None:
    """Train as one more replica of the run in the folder RUN, which has replicas.independent = true.

    It receives the state from another replica and takes its share of each batch, until the run ends or Ctrl-C.

    Exit code 0: done; 2: bad input; 70: do not retry; 75: retry; 130: interrupted.
    """
    from meshwright.app.join import join

    joined = join(run)
    if as_json:
        print_json(json.loads(joined.to_json()))
    sys.exit(joined.exit_code)
