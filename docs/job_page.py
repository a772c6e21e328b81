"""docs/job.md: every key of a job on one page, written from the same words as everything else.

`python -m docs.job_page` in the repository's root writes it and the JSON Schema; a test compares both.
"""

from pathlib import Path

from meshwright.config.keys import SCHEMA_FILE, SECTIONS, Key, job_keys, schema_text, section_meaning
from meshwright.config.write import shown

REFERENCE_FILE = Path("docs/job.md")

_INTRODUCTION = """\
# The job file

A job is a TOML file. Every key has a default, so an empty file is a job too: it trains the smallest model on the
source code of Python's standard library. `meshwright init MODEL` writes a commented job, `meshwright show JOB` prints
each value with where it came from, `meshwright check JOB` reports all errors at once, before any process
starts. This page is generated from the same sentences.

- **On the command line** `section.key=value` overrides the file, as often as needed; the last one counts. Quotes around
  text may be left out (`run.dir=runs/second`), options are reached by name (`model.options.num_layers=2`), and `none`
  unsets a key that may be left out (`train.stop_after=none`).
- **Number of ranks**: a job that leaves `layout.dp_shard` out trains on one rank, and on N with `--ranks N`: `dp_shard`
  is then what the other degrees leave, as with torchtitan's default of -1. The same holds for `cluster.num_devices` and
  torchrun. `dp_shard = 1` is exactly one rank; `dp_shard = -1` takes all CUDA devices where no number is given.
- **Microbatches**: `layout.microbatch_size` is torchtitan's `local_batch_size` and is 1 unless it is set: that fits
  wherever anything does, and its rounding does not change with the memory of the machine. Each data-parallel rank
  accumulates `train.global_batch_size / (data-parallel ranks x microbatch_size)` microbatches; `meshwright check`
  prints how many, and `meshwright plan` chooses a larger size that fits.
- **Counts of tokens** may be written with a decimal suffix, in quotes: `"4M"` is 4 000 000. Underscores group digits
  anywhere: `4_194_304`.
- **Paths to read** (`model.source`, `model.initial_weights`, `adapter.initial`, `data.source`, sources of
  `data.mixture`, `data.tokenizer`, `layout.schedule`) and
  Python modules (`my_module:MyModel`) are looked for in the job file's folder, then in the working directory. Paths
  given on the command line, and the folders that are written (`run.dir`, `data.cache_dir`), are relative to the
  working directory.
- **Hub ids** such as `meta-llama/Llama-3.2-1B` name a model in the cache of `huggingface_hub` (`HF_HOME`), as source,
  initial weights or tokenizer. Nothing is downloaded: `hf download ID` puts it there.
- **Editors** with Taplo or Even Better TOML complete and check a job whose first line names the schema:
  `#:schema path/to/job.schema.json`; `meshwright init MODEL --schema` writes
  that line and the schema next to the job.
"""


def reference_text() -> str:
    """Return docs/job.md."""
    parts = [_INTRODUCTION, "## Before the sections\n", _table([job_keys()["schema_version"]])]
    for section in SECTIONS:
        keys = [key for key in job_keys().values() if key.section == section]
        parts += [f"\n## [{section}]\n", f"{section_meaning(section)}\n", _table(keys)]
    return "\n".join(parts) + "\n"


def _table(keys: list[Key]) -> str:
    rows = [f"| `{key.name}` | {_cell(key.meaning)} | {_cell(key.rule)} | {_default(key)} |" for key in keys]
    return "\n".join(["| key | meaning | must be | default |", "|---|---|---|---|", *rows])


def _default(key: Key) -> str:
    return "left out" if key.default is None else f"`{shown(key.default)}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    REFERENCE_FILE.write_text(reference_text(), encoding="utf-8")
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
