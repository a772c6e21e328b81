"""`meshwright export`: a run's model as a Hugging Face folder, or one of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from meshwright.cli.result_command import print_result, result_command


@result_command
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Checkpoint to export; default: the newest.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Format of the weights; float32 rounds only what was float64.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["hf", "dcp"]),
    default="hf",
    show_default=True,
    help="Hugging Face, or a DCP folder with the names of the state_dict, which own classes cannot have.",
)
@click.option("--merge", is_flag=True, help="Add an adapter to the weights of its model; default: the adapter alone.")
@click.option("--verify", is_flag=True, help="Compare the logits with those that transformers computes from OUT.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Processes that share the work; default: 1.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is a folder of this format and holds nothing else.")
def command(
    run: Path,
    out: Path,
    step: int | None,
    dtype: Literal["float32", "bfloat16"],
    format_: Literal["hf", "dcp"],
    merge: bool,
    verify: bool,
    ranks: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the model of RUN, a run folder or one of its checkpoints, as the new folder OUT.

    An adapter that RUN trained is written alone, as PEFT reads it, or with --merge as part of its model's weights.

    Tensors are read, verified and written one after the other, so memory does not grow with the model. OUT appears only
    when it is complete. Started by torchrun, all of its ranks share the work, on one machine or several.
    """
    from meshwright.checkpoint.format.find_checkpoint import find_checkpoint

    if format_ != "hf" and (verify or ranks != 1):
        what = "--verify compares with transformers" if verify else "--ranks shares the work"
        raise click.UsageError(f"{what} of --format hf only: leave one out")
    # Before torch is imported, which takes seconds.
    find_checkpoint(run, step)
    from meshwright.app.conversion.conversion_ranks import is_under_torchrun, preemptible, share_under_torchrun
    from meshwright.app.conversion.exchange import Export, export, export_as_peer, export_dcp
    from meshwright.checkpoint.hf.export import ExportFormat, ExportRequest

    arguments: dict[str, Any] = {"step": step, "dtype": dtype, "overwrite": overwrite}
    done: Export | None
    with preemptible(out):
        if format_ == "dcp":
            done = export_dcp(run, out, **arguments)
        elif is_under_torchrun():
            request = ExportRequest(run, out, step, ExportFormat(dtype), overwrite, merge)
            done = share_under_torchrun(export_as_peer, {"request": request, "verify": verify}, ranks)
        else:
            done = export(run, out, merge=merge, verify=verify, ranks=ranks, **arguments)
    if done is None:  # rank 0 says it
        return
    print_result(done, as_json)
