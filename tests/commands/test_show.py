"""`meshwright show`: each value of a resolved job, its origin and its meaning."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.config.keys import SECTIONS, job_keys

TEXT = """\
[model]
options = { num_layers = 2 }

[train]
steps = 7
"""


@pytest.fixture(autouse=True)
def with_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(TEXT)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["show", "job.toml", *arguments]) == 0
    return capsys.readouterr().out


def test_every_key_stands_in_the_table_which_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "run.dir=/a/folder/whose/name/is/longer/than/its/column")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("…" in line or "\x1b" in line for line in lines)
    first_words = [line.split()[0] for line in lines if line[:1].strip()]
    assert first_words[2:] == [
        "schema_version",
        *(
            word
            for section in SECTIONS
            for word in (f"[{section}]", *(key.name for key in job_keys().values() if key.section == section))
        ),
    ]


def test_golden_rows(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "train.seq_len=64")
    assert text.startswith(
        "job.toml\n"
        "\n"
        "key                           value                  from          meaning\n"
        "schema_version                1                      default       Version of the job format; a file\n"
    )
    assert "\n[train]                                                            How long, on how much," in text
    assert (
        "\noptions                       { num_layers = 2 }     line 2        Fields of the architecture to\n" in text
    )
    assert (
        "\nsteps                         7                      line 5        Optimizer steps of the whole run.\n"
        in text
    )
    assert "\nseq_len                       64                     command line  Tokens in one sequence.\n" in text
    assert "\nstop_after                    none                   default       Step after" in text


def test_values_that_follow_from_others_are_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(shown(capsys, "--json"))
    assert rows["run.dir"]["value"] == "runs/job"
    assert rows["train.global_batch_size"]["value"] == 8
    rows = json.loads(shown(capsys, "--json", "train.global_batch_tokens=1024"))
    assert rows["train.global_batch_size"]["value"] is None


def test_json_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(shown(capsys, "--json", "train.seq_len=64"))
    assert list(rows) == list(job_keys())
    assert rows["train.steps"] == {
        "value": 7,
        "origin": "job.toml:5",
        "meaning": "Optimizer steps of the whole run.",
    }
    assert rows["train.seq_len"]["origin"] == "command line"
    assert rows["optimizer.betas"]["value"] == [0.9, 0.95]


def test_a_job_with_mistakes_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "job.toml", "train.step=1"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: command line: train.step is an unknown key: did you mean train.steps?\n",
    )
