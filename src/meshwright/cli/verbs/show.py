"""`meshwright show`: every value of a job with where it came from and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.completion import job_words
from meshwright.cli.result_command import print_json, result_command
from meshwright.pages.console import page_console, print_page

if TYPE_CHECKING:
    from meshwright.config.load import ResolvedJob

# Wide enough for four columns; a terminal's own width counts where there is one.
_PIPED_WIDTH = 100


@result_command
@click.argument("job_file", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=job_words)
def command(job_file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show every value of JOB_FILE, where it came from and what it means.

    An origin is a file and line, the command line, or default.
    """
    from meshwright.config.load import load_job

    resolved = load_job(job_file, overrides)
    rows = resolved_rows(resolved)
    if as_json:
        print_json(rows)
    else:
        _print_table(resolved.path, rows)


def resolved_rows(resolved: ResolvedJob) -> dict[str, dict[str, Any]]:
    """Return value, origin and meaning of every key by its dotted name, in the order of the file."""
    from meshwright.config.keys import job_keys

    values = _resolved_values(resolved)
    return {
        dotted: {
            "value": values[key.section][key.name] if key.section else values[key.name],
            "origin": resolved.origins[dotted],
            "meaning": key.meaning,
        }
        for dotted, key in job_keys().items()
    }


def _resolved_values(resolved: ResolvedJob) -> dict[str, Any]:
    """Return the job's values, with those that follow from others where a key was left out."""
    job = resolved.job
    values = job.to_dict()
    values["run"]["dir"] = str(resolved.run_dir)
    values["layout"].setdefault("dp_shard", job.layout.dp_shard)
    if resolved.leaves_compile_open:
        values["layout"]["compile"] = "auto"
    if job.train.global_batch_tokens is None:
        values["train"]["global_batch_size"] = job.global_batch_size
    return values


def _print_table(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    from rich.text import Text

    from meshwright.config.keys import job_keys, section_meaning
    from meshwright.config.write import shown
    from meshwright.pages.tables.page_table import PageTable

    table = PageTable("key", "value", "from", "meaning")
    table.columns[0].no_wrap = True
    section = ""
    for dotted, row in rows.items():
        key = job_keys()[dotted]
        if key.section != section:
            section = key.section
            table.add_row("", "", "", "")
            table.add_row(Text(f"[{section}]", style="bold"), "", "", Text(section_meaning(section), style="bold"))
        style = "dim" if row["origin"] == "default" else ""
        # Text and not str: a value in brackets is no markup of rich's.
        # The file's name stands above the table.
        origin = row["origin"].replace(f"{path}:", "line ")
        cells = (key.name, shown(row["value"], 200), origin, row["meaning"])
        table.add_row(*(Text(cell, style=style) for cell in cells))
    console = page_console(piped_width=_PIPED_WIDTH)
    with console.capture() as captured:
        print_page(console, [Text(f"{path}\n"), table])
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
