"""`meshwright init`: a job file for a named model, every key in it with what it means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.completion import model_names
from meshwright.cli.result_command import print_json, result_command

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_HEADER = """\
# A job for {model}, written by `meshwright init`: places to start from, not tuned values.
# Set [data] to your own text and tokenizer. `meshwright check {file}` lists what is wrong with it."""


@result_command
@click.argument("model", shell_complete=model_names)
@click.option("--out", type=click.Path(path_type=Path), default=Path("job.toml"), show_default=True, help="File.")
def command(model: str, out: Path, as_json: bool) -> None:
    """Write a commented job file for MODEL: a preset (`meshwright list models`) or a Hugging Face config.json.

    An existing file is never overwritten.
    """
    from meshwright.config.write import to_toml

    job = job_for(model)
    _write_new(out, to_toml(job, first_line=_first_lines(model, out)))
    if as_json:
        print_json({"file": str(out), "job": job.to_dict()})
    else:
        click.echo(f"wrote {out}\nnext: meshwright check {out}, then meshwright train {out}")


def job_for(model: str) -> Job:
    """Return a job with keys that suit the size of `model`; raises ConfigError for a model that is not known."""
    from meshwright.config.starting import starting_job
    from meshwright.errors import ConfigError
    from meshwright.spec.job.sections import ModelSection
    from meshwright.spec.model.model_source import resolve_architecture
    from meshwright.spec.model.model_spec import model_spec

    architecture = resolve_architecture(ModelSection(source=model))
    if architecture is None:
        raise ConfigError(
            f"{model!r} is a class of your own, whose size is not known before it runs: name a preset "
            f"(`meshwright list models`) to begin with, then set model.source = {model!r} in the file"
        )
    return starting_job(model, model_spec(architecture).num_parameters, architecture.max_seq_len)


def _first_lines(model: str, out: Path) -> str:
    from meshwright.config.schema import schema_line

    return f"{schema_line(out.absolute().parent)}\n{_HEADER.format(model=model, file=out)}"


def _write_new(out: Path, text: str) -> None:
    from meshwright.errors import ConfigError

    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} exists and is not overwritten: name another file with --out, or remove it") from None
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror}): name a file in a folder that exists and is yours with --out"
        ) from None
