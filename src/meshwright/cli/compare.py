"""`meshwright compare`: two steps side by side: a prediction and a measurement, or two of either."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from meshwright.spec.timeline import Timeline

_LEAST_WIDTH = 120
_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("a", metavar="A", type=_PATH)
@click.argument("b", metavar="B", type=_PATH)
@click.option("--step", type=click.IntRange(min=1), help="Step of a profile; default: its last one.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(a: Path, b: Path, step: int | None, as_json: bool) -> None:
    """Show where step A and step B differ: by component, by operation, by rank.

    Each is the folder of a run that was profiled (run.profile_start), a folder or a .npz that `meshwright simulate
    --out` wrote, or a trace of torch.profiler (.json or .json.gz) of one rank.
    """
    from meshwright.spec.comparison import compare

    found = compare(read_step(a, step), read_step(b, step))
    if as_json:
        click.echo(found.to_json())
        return
    from rich.console import Console

    from meshwright.report.compare_table import compare_page

    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    for part in compare_page(found):
        console.print(part)


def read_step(path: Path, step: int | None) -> Timeline:
    """Return the step at `path`; raises ConfigError for what holds none."""
    from zipfile import BadZipFile

    from meshwright.errors import ConfigError
    from meshwright.profiler.run_profile import profile_of_run
    from meshwright.profiler.timeline import timeline_of
    from meshwright.spec.timeline import Timeline

    written = path / "timeline.npz" if path.is_dir() else path
    if written.suffix == ".npz" and written.is_file():
        try:
            return Timeline.load(written)
        except (BadZipFile, KeyError, ValueError) as error:
            raise ConfigError(f"{written} is no timeline ({error}): name one that simulate --out wrote") from None
    if path.is_dir():
        return profile_of_run(path, step)
    return timeline_of([path], path.name, step)
