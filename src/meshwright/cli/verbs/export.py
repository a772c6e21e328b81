"""`meshwright export`: a run's model as a Hugging Face folder, or one of torch.distributed.checkpoint."""

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
@click.option(
    "--format",
    "format_",
    type=click.Choice(["hf", "dcp"]),
    default="hf",
    show_default=True,
    help="Hugging Face, or a DCP folder with the names of the model's state_dict.",
)
@click.option("--verify", is_flag=True, help="Compare the logits with those that transformers computes from OUT.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is a folder of this format and holds nothing else.")
def command(
    run: Path,
    out: Path,
    step: int | None,
    dtype: Literal["float32", "bfloat16"],
    format_: Literal["hf", "dcp"],
    verify: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the model of RUN, a run folder or one of its checkpoints, as the new folder OUT.

    Tensors are read, verified and written one after the other, so memory does not grow with the model. OUT appears only
    when it is complete.
    """
    from meshwright.checkpoint.find_checkpoint import find_checkpoint

    if verify and format_ != "hf":
        raise click.UsageError("--verify compares with transformers, which reads --format hf only: leave one out")
    # Before torch is imported, which takes seconds.
    find_checkpoint(run, step)
    from meshwright.app.exchange import export, export_dcp

    if format_ == "dcp":
        done = export_dcp(run, out, step=step, dtype=dtype, overwrite=overwrite)
    else:
        done = export(run, out, step=step, dtype=dtype, verify=verify, overwrite=overwrite)
    if as_json:
        print_json({**asdict(done), "checkpoint": str(done.checkpoint), "folder": str(done.folder)})
    else:
        done.show()
