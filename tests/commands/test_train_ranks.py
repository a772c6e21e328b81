from pathlib import Path

import pytest

from meshwright.app.train import num_ranks_of
from meshwright.cli.main import run
from meshwright.errors import ExitCode
from meshwright.spec.job.job import Job
from repository import ROOT


@pytest.mark.parametrize(
    ("layout", "asked", "expected"),
    [({"dp_shard": -1}, None, 1), ({"dp_shard": -1}, 3, 3), ({"dp_shard": 2, "dp_replicate": 2}, None, 4)],
)
def test_ranks_come_from_the_command_then_the_layout_then_the_machine(
    layout: dict[str, int], asked: int | None, expected: int
) -> None:
    job = Job.from_dict({"layout": layout, "run": {"device": "cpu"}})
    assert num_ranks_of(job, asked) == expected


def test_a_rank_of_torchrun_cannot_start_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text("")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["train", str(tmp_path / "job.toml"), "--ranks", "3"]) == 2
    assert capsys.readouterr().err == "error: --ranks 3, but torchrun started 2 ranks already: leave --ranks out\n"


@pytest.mark.parametrize("rank", ["0", "2"])
@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (
            "tp = 2",
            "3 ranks do not divide by tp=2, so layout.dp_shard has no value: set layout.tp to 1 and "
            "train.global_batch_size to 6, or start 2 or 4 ranks",
        ),
        ("dp_shard = -1", "train.global_batch_size = 8 does not divide by 3 data-parallel ranks"),
        ("tp = -1", "layout.tp = 3 does not divide the model's num_heads = 4 and ffn_dim = 512"),
    ],
)
def test_a_rank_of_torchrun_refuses_a_layout_by_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    layout: str,
    problem: str,
) -> None:
    # No other rank is there: one that waited for them would find no address to wait at.
    (tmp_path / "job.toml").write_text(f"[layout]\n{layout}\n")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert run(["train", str(tmp_path / "job.toml")]) == 2
    assert problem in capsys.readouterr().err


def test_a_rank_without_a_world_size_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run(["train", str(ROOT / "examples" / "tiny.toml")]) == ExitCode.BAD_INPUT
    assert "RANK=0 but no WORLD_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [None, "0"])
def test_a_kernel_that_this_machine_lacks_is_the_one_error_whatever_else_it_needs(
    rank: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwright.app.job.cpu_training.nvidia_driver", lambda: None)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "1")
    float32 = [str(ROOT / "examples" / "tiny.toml"), "layout.attention_backend=varlen"]
    assert run(["train", *float32]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == (
        'error: command line: layout.attention_backend = "varlen" has no kernel on a CPU: set layout.attention_backend '
        'to "flex" or "auto"\n'
    )
    assert run(["train", *float32, "run.device=cuda"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == (
        'error: command line: layout.attention_backend = "varlen" computes in 16 bits (bfloat16, float16), and '
        'precision.compute = "float32": set precision.compute to "bfloat16", or layout.attention_backend to "auto"\n'
    )


@pytest.mark.parametrize("command", ["train", "plan"])
def test_an_attention_backend_without_a_kernel_here_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "job.toml").write_text(
        '[layout]\nattention_backend = "varlen"\n[precision]\ncompute = "bfloat16"\n[run]\ndevice = "cpu"\n'
    )
    assert run([command, str(tmp_path / "job.toml")]) == 2
    assert '"varlen" has no kernel on a CPU: set layout.attention_backend to "flex"' in capsys.readouterr().err
