"""`meshwright export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click

from meshwright.cli.result_command import print_json, result_command


@result_command
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Checkpoint to export; default: the newest.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Format of the weights; float32 loses nothing.",
)
@click.option("--check", is_flag=True, help="Compare the logits with those that transformers computes from OUT.")
def command(
    run: Path, out: Path, step: int | None, dtype: Literal["float32", "bfloat16"], check: bool, as_json: bool
) -> None:
    """Write the model of RUN, a run folder or one of its checkpoints, as the new Hugging Face folder OUT."""
    from meshwright.checkpoint.find_checkpoint import find_checkpoint

    # Before torch is imported, which takes seconds.
    find_checkpoint(run, step)
    from meshwright.app.exchange import export

    done = export(run, out, step=step, dtype=dtype, check=check)
    if as_json:
        print_json({**asdict(done), "checkpoint": str(done.checkpoint), "folder": str(done.folder)})
    else:
        done.show()
