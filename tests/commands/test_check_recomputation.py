"""`meshwright check` of what is recomputed, what fits, and what is profiled."""

from pathlib import Path

import pytest

from meshwright.cli.main import run


@pytest.fixture(autouse=True)
def in_a_folder_with_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 500)
    monkeypatch.chdir(tmp_path)


def job_file(text: str = "") -> str:
    Path("job.toml").write_text(f'{text}\n[data]\nsource = "corpus.txt"\n')
    return "job.toml"


def summary_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert run(["check", *arguments]) == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.app.job.cpu_training.nvidia_driver", lambda: None)


_AUTO = "layout.dp_shard=2", "layout.activation_checkpoint=auto"


@pytest.mark.usefixtures("without_gpu")
def test_what_blocks_save_is_noted_on_this_machine_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", job_file(), *_AUTO, "layout.memory_budget_bytes=100000000000"]) == 0
    assert (
        'note    layout.activation_checkpoint = "auto" is priced as none in all blocks, chosen by formulas'
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("cluster", [(), ("cluster.name=h100",)])
def test_a_budget_that_full_recomputation_exceeds_is_refused_once(
    capsys: pytest.CaptureFixture[str], cluster: tuple[str, ...]
) -> None:
    assert run(["check", job_file(), *_AUTO, "layout.memory_budget_bytes=1000", *cluster]) == 2
    shown = capsys.readouterr()
    assert "error: tensors take " in shown.err
    assert "more than the budget of 1000 B" in shown.err
    assert "budget" not in shown.out


def test_what_blocks_save_of_an_unknown_gpu_is_left_open(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.app.job.cpu_training.nvidia_driver", lambda: "580")
    assert "note" not in summary_of(capsys, job_file(), *_AUTO)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["train.steps=60"], "train.steps = 60; must be from 1 to 60: set run.profile_start to 59, or leave"),
        (["train.stop_after=1"], "train.stop_after = 1; must be from 1 to 1: set run.profile_start to 1, or leave"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_profile_of_steps_after_the_last_is_refused(
    verb: str, keys: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, job_file(), "run.profile_start=61", *keys]) == 2
    assert f"run.profile_start = 61 lies after the last step, {message}" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_last_step_can_be_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert "job" in summary_of(capsys, job_file(), "run.profile_start=60", "train.steps=60")


def test_a_layout_that_does_not_fit_is_not_called_valid(capsys: pytest.CaptureFixture[str]) -> None:
    text = '[model]\nsource = "llama3-70b"\n[cluster]\nname = "h100-ib400"\n[layout]\ndp_shard = 8\n'
    assert run(["check", job_file(text)]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("job     job.toml: keys valid, layout does not fit\n")
    assert "configuration valid" not in shown.out
    assert "`meshwright plan` searches all layouts for one that fits" in shown.err


def test_a_budget_that_formulas_refuse_is_said_to_be_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    text = '[model]\nsource = "llama3-8b"\n[cluster]\nname = "h100-ib400"\n[layout]\ndp_shard = 8\n'
    keys = ["layout.activation_checkpoint=auto", "layout.memory_budget_bytes=1000000000"]
    assert run(["check", job_file(text), *keys]) == 2
    assert "train and simulate choose by a trace, which may need up to 5 % more" in capsys.readouterr().err


def test_an_interval_of_recomputation_beyond_the_blocks_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [job_file(), "layout.activation_checkpoint=full"]
    assert "note" not in summary_of(capsys, *keys, "layout.activation_checkpoint_every=2")
    note = summary_of(capsys, *keys, "layout.activation_checkpoint_every=99")["note"]
    assert note.startswith("layout.activation_checkpoint_every = 99 is more than the model's num_layers = ")
