"""[[data.mixture]] in a job file: paths relative to the file, and messages that name the table."""

from pathlib import Path

import pytest

from meshwright.config.load import load_job
from meshwright.config.write import to_toml
from meshwright.errors import ConfigError

JOB = """
[[data.mixture]]
source = "texts/web.txt"
[[data.mixture]]
source = "tokens/code"
weight = 0.5
[[data.mixture]]
source = "s3://bucket/books"
"""


def write_job(folder: Path, text: str = JOB) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_sources_are_found_next_to_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("texts/web.txt", "tokens/code.bin", "tokens/code.idx"):
        (tmp_path / "jobs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "jobs" / name).touch()
    monkeypatch.chdir(tmp_path)
    job = load_job(write_job(tmp_path / "jobs")).job
    folder = tmp_path / "jobs"
    expected = [str(folder / "texts/web.txt"), str(folder / "tokens/code"), "s3://bucket/books"]
    assert [table.source for table in job.data.mixture] == expected
    again = write_job(tmp_path, to_toml(job))
    assert load_job(again).job == job
    (tmp_path / "one.toml").write_text('[data]\nsource = "code"\n')
    (tmp_path / "one.toml").rename(folder / "tokens" / "one.toml")
    assert load_job(folder / "tokens" / "one.toml").job.data.source == str(folder / "tokens" / "code")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('source = "a"\nweight = -1', "data.mixture, table 2: weight = -1 must be a number, 0 or more: change it, or"),
        ("weight = 1", "data.mixture, table 2 has no source: add it; it must be a string"),
        ('source = "a"\nshare = 2', "data.mixture, table 2 has share = 2, an unknown key: a table's are source"),
        ('source = "a"\nweights = [1, "b"]', 'data.mixture, table 2: weights = "b" must be a list of numbers'),
    ],
)
def test_a_wrong_key_of_a_table_is_named(tmp_path: Path, table: str, message: str) -> None:
    path = write_job(tmp_path, f'[[data.mixture]]\nsource = "stdlib"\n[[data.mixture]]\n{table}\n')
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert message in str(caught.value)
