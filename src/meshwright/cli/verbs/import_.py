"""`meshwright import`: a Hugging Face folder as a run."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.result_command import print_json, result_command
from meshwright.log import fitted


@result_command
@click.argument("hf_folder", metavar="HF_FOLDER", type=click.Path(path_type=Path))
@click.argument("run_folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
def command(hf_folder: Path, run_folder: Path, as_json: bool) -> None:
    """Write the weights of HF_FOLDER, bit by bit, as checkpoint step-0 of the new run RUN_FOLDER.

    HF_FOLDER may also be the id of a model of the Hugging Face Hub that was downloaded to this machine.

    Training from them needs no import: set model.source to the folder's config.json and model.initial_weights to
    HF_FOLDER.
    """
    from meshwright.checkpoint.find_checkpoint import model_folder
    from meshwright.units import format_count

    # Before torch is imported, which takes seconds.
    model_folder(hf_folder)
    from meshwright.checkpoint.hf.import_ import import_folder
    from meshwright.checkpoint.hf.side_files import TOKENIZER

    done = import_folder(hf_folder, run_folder)
    if as_json:
        checkpoint = str(done.run.checkpoint(0))
        print_json({"checkpoint": checkpoint, "num_parameters": done.num_parameters, "dtypes": done.dtypes})
        return
    parameters = f"{format_count(done.num_parameters)} parameters in {' and '.join(done.dtypes)}"
    click.echo(fitted(f"{hf_folder} -> {done.run.checkpoint(0)}: {parameters}"))
    generate = f"meshwright generate {run_folder}, or train from it: " * (run_folder / TOKENIZER).is_file()
    click.echo(fitted(f"next: {generate}meshwright train {done.run.job} run.dir=NEW"))
