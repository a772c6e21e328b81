"""What a job reads is looked for in its folder, then in the working directory; what it writes is not."""

from pathlib import Path

import pytest

from meshwright.app.job.job_problems import check_job
from meshwright.config.load import load_job
from meshwright.config.paths import with_absolute_paths
from meshwright.spec.job.job import Job

TEXT = "some words of text\n" * 500


@pytest.fixture(autouse=True)
def _in_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory next to the folder of the job."""
    for folder in ("jobs", "shell"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "shell")


def job_file(text: str) -> Path:
    Path("../jobs/job.toml").write_text(text, encoding="utf-8")
    return Path("../jobs/job.toml")


def test_a_path_is_relative_to_the_job_file() -> None:
    Path("../jobs/corpus.txt").write_text(TEXT, encoding="utf-8")
    resolved = load_job(job_file('[data]\nsource = "corpus.txt"\n[run]\ndir = "runs/a"'))
    assert resolved.job.data.source == "../jobs/corpus.txt"
    assert resolved.run_dir == Path("runs/a")
    assert check_job(resolved, 1) == []


def test_the_job_files_folder_comes_before_the_working_directory() -> None:
    Path("corpus.txt").write_text(TEXT, encoding="utf-8")
    file = job_file('[data]\nsource = "corpus.txt"')
    assert load_job(file).job.data.source == "corpus.txt"
    Path("../jobs/corpus.txt").write_text(TEXT, encoding="utf-8")
    assert load_job(file).job.data.source == "../jobs/corpus.txt"


def test_an_override_is_relative_to_the_working_directory() -> None:
    Path("../jobs/corpus.txt").write_text(TEXT, encoding="utf-8")
    resolved = load_job(job_file('[data]\nsource = "corpus.txt"'), ["data.source=corpus.txt"])
    assert resolved.job.data.source == "corpus.txt"
    (problem,) = check_job(resolved, 1)
    assert "does not exist" in problem


def test_a_missing_path_names_both_places(tmp_path: Path) -> None:
    keys = '[data]\nsource = "corpus.txt"\ntokenizer = "tokenizer.json"\n[model]\ninitial_weights = "weights"\n'
    problems = check_job(load_job(job_file(f'{keys}[layout]\nschedule = "own.csv"\npp = 2')), 2)
    assert len(problems) == 4
    for problem in problems:
        assert f"folder {tmp_path / 'jobs'}, then in the working directory {tmp_path / 'shell'}" in problem


def test_names_are_no_paths() -> None:
    for name in ("stdlib", "bytes", "llama-1m", "1F1B"):
        Path("../jobs", name).mkdir()
    text = '[model]\nsource = "llama-1m"\n[data]\nsource = "stdlib"\ntokenizer = "bytes"\n[layout]\nschedule = "1F1B"'
    assert load_job(job_file(text)).job == Job()


def test_absolute_paths_hold_in_any_folder() -> None:
    Path("../jobs/corpus.txt").write_text(TEXT, encoding="utf-8")
    job = with_absolute_paths(load_job(job_file('[data]\nsource = "corpus.txt"')).job)
    assert job.data.source == str(Path("../jobs/corpus.txt").resolve())
    assert job.layout.is_open
    assert with_absolute_paths(Job()) == Job()
