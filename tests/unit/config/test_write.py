"""Jobs written as files: they read back equal, and every key in them says what it is."""

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from meshwright.config.keys import job_keys
from meshwright.config.load import inspect_job
from meshwright.config.write import key_comment, to_toml
from meshwright.spec.job.job import Job
from random_jobs import jobs


def read_back(text: str) -> Job:
    """Return the job of a text; what contradicts itself between keys is read like anything else."""
    # In the job's own folder, where no path that was drawn changes.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        file = Path("job.toml")
        file.write_bytes(text.encode())
        inspection = inspect_job(file)
    assert not inspection.wrong
    return inspection.resolved.job


@pytest.mark.slow
# Most drawn jobs are refused.
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much])
@given(jobs())
def test_a_job_reads_back_equal(job: Job) -> None:
    assert read_back(to_toml(job)) == job


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much])
@given(jobs())
def test_a_job_survives_json(job: Job) -> None:
    assert Job.from_json(job.to_json()) == job
    assert Job.from_dict(job.to_dict()) == job


def test_every_key_stands_in_the_file_with_its_meaning() -> None:
    text = to_toml(Job())
    words = " ".join(text.replace("\n#", "").split())
    for key in job_keys().values():
        assert f"\n{key.name} = " in text or f"\n# {key.name} = " in text
        assert " ".join(key_comment(key).split()) in words


def test_examples_of_keys_that_were_left_out_are_right_once_uncommented() -> None:
    optional = [key for key in job_keys().values() if key.is_optional]
    assert optional
    text = to_toml(Job())
    for key in optional:
        start = text.index(f"[{key.section}]")
        before, after = text[:start], text[start:]
        changed = before + after.replace(f"\n# {key.name} = ", f"\n{key.name} = ", 1)
        assert getattr(getattr(read_back(changed), key.section), key.name) is not None


def test_golden_beginning() -> None:
    assert to_toml(Job(), first_line="#:schema x").startswith(
        "#:schema x\n"
        "\n"
        "# Version of the job format; a file without it is read as the newest. A whole number, 1; default 1.\n"
        "schema_version = 1\n"
        "\n"
        "# What is trained.\n"
        "[model]\n"
        "# A preset (see `meshwright list models`), a Hugging Face config.json or hub id, or\n"
        '# my_module:MyModel. A string; default "llama-1m".\n'
        'source = "llama-1m"\n'
    )
