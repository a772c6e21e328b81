"""`meshwright export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

# Float32 sums in another order differ by some 1e-5 in models of billions of parameters; a wrong weight by 0.1 and more.
_TOLERANCE = 1e-3


@click.command()
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
def command(run: Path, out: Path, step: int | None, dtype: Literal["float32", "bfloat16"], check: bool) -> None:
    """Write the model of RUN, a run folder or one of its checkpoints, as the new Hugging Face folder OUT."""
    from meshwright.checkpoint.hf.export import export
    from meshwright.units import format_bytes, format_count

    done = export(run, out, step=step, dtype=dtype)
    files = "one file" if done.num_files == 1 else f"{done.num_files} files"
    click.echo(
        f"{done.model.checkpoint} -> {out}: {format_count(done.num_parameters)} parameters in {dtype}, "
        f"{format_bytes(done.num_bytes)} in {files}"
    )
    if check:
        click.echo(_comparison(done.model.checkpoint, out, dtype))


def _comparison(checkpoint: Path, out: Path, dtype: str) -> str:
    import importlib.util

    import torch

    from meshwright.errors import CheckpointError
    from meshwright.inference.compare import max_logits_difference
    from meshwright.inference.load import load_model

    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed, so nothing was compared: pip install 'meshwright[hf]'"
    model = load_model(checkpoint, device=torch.device("cpu")).model
    difference = max_logits_difference(model, out, getattr(torch, dtype))
    import transformers

    if difference > _TOLERANCE:
        raise CheckpointError(
            f"transformers {transformers.__version__} computes other logits from {out}, off by up to {difference:.1e} "
            f"where rounding explains {_TOLERANCE:.0e}: do not use {out}, and report this as a bug"
        )
    return f"logits equal those of transformers {transformers.__version__} within {difference:.1e} (float32)"
