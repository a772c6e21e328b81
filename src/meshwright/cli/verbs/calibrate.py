"""`meshwright calibrate`: measures this machine and writes it as a device and a cluster of the user's own catalogue."""

import re
from pathlib import Path

import click

from meshwright.cli.finite_range import FiniteRange
from meshwright.cli.result_command import print_json, result_command


def _catalogue_name(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    from meshwright.errors import ConfigError
    from meshwright.spec.machine.device import NAME_PATTERN

    if name is not None and not re.match(NAME_PATTERN, name):
        raise ConfigError(f"--name {name!r} is no catalogue name: use lower-case letters, digits, dots and dashes")
    return name


@result_command
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: GPUs if there are.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks that work at once; default: one a GPU, or one a core.")
@click.option(
    "--name", callback=_catalogue_name, help="Name in the catalogue; default: cpu-local, or the GPU's name and -local."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder; default: your own catalogue's.")
@click.option(
    "--seconds",
    "duration_s",
    type=FiniteRange(min=1),
    default=30,
    show_default=True,
    help="Approximate time of the kernel measurements; a CPU takes as long again for steps.",
)
def command(
    device: str, ranks: int | None, name: str | None, out: Path | None, duration_s: float, as_json: bool
) -> None:
    """Measure this machine: matrix products, attention, memory, host and collectives, with all ranks busy at once.

    Writes devices/NAME.toml and clusters/NAME.toml, which `meshwright plan --cluster NAME:COUNT` understands. Nothing
    else should run meanwhile: what is measured then is half a machine.
    """
    from meshwright.app.calibrate import calibrate

    found = calibrate(device, ranks=ranks, name=name, out=out, duration_s=duration_s)
    if as_json:
        print_json(found.to_dict())
    else:
        found.show()
