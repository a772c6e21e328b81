"""`meshwright list`: the models, devices and clusters that a job can name."""

from typing import Literal

import click

from meshwright.cli.result_command import print_json, result_command


@result_command
@click.argument("kind", type=click.Choice(["models", "devices", "clusters"]))
def command(kind: Literal["models", "devices", "clusters"], as_json: bool) -> None:
    """List the models, devices or clusters that a job can name.

    Devices and clusters of your own go to ~/.config/meshwright/devices/NAME.toml and clusters/NAME.toml, or into the
    folder that MESHWRIGHT_CATALOGUE names.
    """
    from meshwright.app.list_ import list_

    found = list_(kind)
    if as_json:
        print_json(found.records)
    else:
        found.show()
