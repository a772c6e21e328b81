"""`meshwright init`: a job file for a named model, every key in it with what it means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.completion import model_names
from meshwright.cli.result_command import print_json, result_command
from meshwright.log import fitted

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

SCHEMA_NAME = "job.schema.json"
_HEADER = """\
# A job for {model}, written by `meshwright init`: places to start from, not tuned values.
# Set [data] to your own text and tokenizer. `meshwright check {file}` lists what is wrong with it."""


@result_command
@click.argument("model", shell_complete=model_names)
@click.option("--out", type=click.Path(path_type=Path), default=Path("job.toml"), show_default=True, help="File.")
@click.option("--schema", is_flag=True, help=f"Also write {SCHEMA_NAME} next to it, with which editors check the job.")
def command(model: str, out: Path, schema: bool, as_json: bool) -> None:
    """Write a commented job file for MODEL: a preset (`meshwright list models`), a Hugging Face config.json or hub id.

    An existing file is never overwritten.
    """
    from meshwright.config.keys import schema_text
    from meshwright.config.write import to_toml

    job = job_for(model)
    if os.path.exists(model) and not os.path.isabs(model):
        # A job's paths are relative to its folder.
        source = os.path.relpath(model, out.parent)
        job = job.replace(model=job.model.replace(source=source))
    first_lines = _HEADER.format(model=model, file=out)
    if schema:
        file = out.with_name(SCHEMA_NAME)
        if not file.exists() or file.read_text(encoding="utf-8") != schema_text():
            _write_new(file, schema_text())
        first_lines = f"#:schema {SCHEMA_NAME}\n{first_lines}"
    _write_new(out, to_toml(job, first_line=first_lines))
    if as_json:
        print_json({"file": str(out), "job": job.to_dict()})
    else:
        click.echo(fitted(f"wrote {out}\nnext: meshwright check {out}, then meshwright train {out}"))


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
