"""A mixture trains the same on other ranks and through stops, and says how much of each source it has read."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import DataError, ExitCode
from training_runs import tiny_job, train_on_ranks
from written_corpora import write_megatron, write_tar


def mixed_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job over JSON lines with a broken one and a copy, an archive, and stored tokens."""
    lines = [json.dumps({"text": f"{n} plus {n} is {2 * n}. " * 3}) for n in range(300)]
    (folder / "web.jsonl").write_text("\n".join([*lines, "{", lines[0], ""]))
    write_tar(folder / "code.tar", {f"{n}.txt": f"def f{n}(): return {n}\n".encode() * 4 for n in range(100)})
    write_megatron(folder / "books", [[*(b"a book " * 8), 256] for _ in range(100)])
    tables = [
        {"source": str(folder / "web.jsonl"), "weights": [0.6, 0.2]},
        {"source": str(folder / "code.tar"), "weights": [0.3, 0.2], "text_key": ".txt"},
        {"source": str(folder / "books"), "weights": [0.1, 0.6]},
    ]
    job = tiny_job(folder, train={"validation_interval": 3, "validation_batches": 1}, **sections)
    job["data"] = {"mixture": tables, "stage_steps": [3], "on_bad_document": "skip", "cache_dir": str(folder / "cache")}
    return job


def columns(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "/" in key} for row in rows if "loss" in row]


def test_a_mixture_goes_on_with_the_same_samples_on_other_ranks(tmp_path: Path) -> None:
    straight = train_on_ranks(mixed_job(tmp_path), tmp_path / "straight", 1)
    job = mixed_job(tmp_path)
    job["train"]["stop_after"] = 4
    assert train_on_ranks(job, tmp_path / "stopped", 2).codes == [ExitCode.RETRY] * 2
    resumed = train_on_ranks(mixed_job(tmp_path), tmp_path / "stopped", 4, resume=True)
    assert resumed.losses == pytest.approx(straight.losses, rel=1e-5)
    assert columns(tmp_path / "stopped") == columns(tmp_path / "straight")
    # 24 positions of 6 : 3 : 1, then 24 of 1 : 1 : 3.
    last = columns(tmp_path / "straight")[-1]
    counts = [last[f"samples/{name}"] for name in ("web", "code", "books")]
    assert sum(counts) == 48
    for count, share in zip(counts, (14.4 + 4.8, 7.2 + 4.8, 2.4 + 14.4), strict=True):
        assert abs(count - share) <= 2, "at most 1 in each stage"
    assert last["tokens/web"] == counts[0] * 32
    assert last["epochs/web"] == pytest.approx(counts[0] / straight.manifest.data["mixture"][0]["num_training_samples"])
    log = (tmp_path / "straight" / "logs" / "rank-0.log").read_text()
    assert log.count("web: left out 1 document that cannot be read") == 1
    assert f"books: {counts[2]} samples" in log


def test_a_run_does_not_go_on_with_another_source(tmp_path: Path) -> None:
    job = mixed_job(tmp_path)
    job["train"]["stop_after"] = 3
    train_on_ranks(job, tmp_path / "run", 1)
    write_megatron(tmp_path / "books", [[*(b"another book " * 8), 256] for _ in range(100)])
    with pytest.raises(
        (DataError, RuntimeError, AssertionError), match=r"data.mixture, table 3 \(books\): content_hash"
    ):
        train_on_ranks(mixed_job_with(tmp_path, job), tmp_path / "run", 1, resume=True)


def mixed_job_with(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    return {**job, "train": {**job["train"], "stop_after": 6}}
