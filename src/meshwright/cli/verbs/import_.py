"""`meshwright import`: weights of a Hugging Face folder or a checkpoint of torch as a run."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.result_command import print_json, result_command
from meshwright.log import fitted


@result_command
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("run_folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--config", type=click.Path(path_type=Path), help="Folder of config.json and tokenizer, if not SOURCE.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Processes that share the work; default: 1.")
@click.option("--overwrite", is_flag=True, help="Replace RUN_FOLDER if it is an import that was not trained.")
def command(source: Path, run_folder: Path, config: Path | None, ranks: int, overwrite: bool, as_json: bool) -> None:
    """Write the weights of SOURCE, bit by bit, as checkpoint step-0 of the new run RUN_FOLDER.

    SOURCE is a Hugging Face folder or the id of a model of the Hugging Face Hub that was downloaded to this machine. It
    may also be a torch.save file (read with weights_only) or a torch.distributed.checkpoint folder, with the names of
    Hugging Face, of Meta's Llama and torchtitan, or of Meshwright; --config names the folder of its config.json.

    Weights in block-fp8 become bfloat16. Tensors are read and written one after the other, so memory does not grow with
    the model. Every tensor of SOURCE is mapped, or dropped and named, or an error.

    Started by torchrun, all of its ranks share the work, on one machine or several.

    Training from them needs no import: set model.source to the folder's config.json and model.initial_weights to
    SOURCE.
    """
    from meshwright.checkpoint.find_checkpoint import model_folder
    from meshwright.units import counted, first_of, format_count

    # Before torch is imported, which takes seconds.
    is_hf = not (source.is_file() or (source / ".metadata").is_file())
    if is_hf:
        model_folder(config or source)
    from meshwright.app.conversion_ranks import is_under_torchrun, share, share_under_torchrun
    from meshwright.checkpoint.hf.import_ import import_folder
    from meshwright.checkpoint.hf.side_files import TOKENIZER

    arguments = {"source": source, "run_folder": run_folder, "config": config, "overwrite": overwrite}
    done = (share_under_torchrun if is_under_torchrun() else share)(import_folder, arguments, ranks)
    if done is None:  # rank 0 says it
        return
    if as_json:
        checkpoint = str(done.run.checkpoint(0))
        result = {"checkpoint": checkpoint, "num_parameters": done.num_parameters, "dtypes": done.dtypes}
        print_json({**result, "dropped": done.dropped})
        return
    parameters = f"{format_count(done.num_parameters)} parameters in {' and '.join(done.dtypes)}"
    click.echo(fitted(f"{source} -> {done.run.checkpoint(0)}: {parameters}"))
    for reason, names in done.dropped.items():
        click.echo(fitted(f"dropped {counted(len(names), 'tensor')} ({first_of(names, 2)}): {reason}"))
    # initial_weights takes Hugging Face folders only.
    export = f"meshwright export {run_folder} HF_FOLDER, then set model.initial_weights to HF_FOLDER"
    train = f"meshwright train {done.run.job} run.dir=NEW" if is_hf else export
    generate = f"meshwright generate {run_folder}, or train from it: " * (run_folder / TOKENIZER).is_file()
    click.echo(fitted(f"next: {generate}{train}"))
