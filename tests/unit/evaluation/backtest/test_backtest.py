"""`meshwright backtest`: any file of runs gets an answer for every row, and what is wrong with it is told."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshwright.cli.verbs.backtest import command
from meshwright.errors import ConfigError
from meshwright.evaluation.backtest.predict_runs import COLUMNS, load_runs, predict_runs
from meshwright.evaluation.backtest.score import POOLED, overall, picking_score, scores
from meshwright.evaluation.fitting.given_runs import calibrate_given
from meshwright.spec.run.backtest_scores import Prediction

RUN = {
    "id": "a",
    "source_family": "mine",
    "stack": "my-stack-2026",
    "model_family": "my-1b",
    "n_layers": "16",
    "hidden": "2048",
    "ffn_hidden": "8192",
    "n_heads": "16",
    "vocab": "32000",
    "seq_len": "4096",
    "gpu": "H100-80GB",
    "n_gpus": "64",
    "gpus_per_node": "8",
    "dp": "64",
    "tp": "1",
    "pp": "1",
    "fsdp_zero_stage": "3",
    "micro_batch": "2",
    "global_batch": "256",
    "precision": "bf16",
    "step_time_s": "0.9",
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_runs(*changes: dict[str, str], name: str = "runs.csv", line_end: str = "\n") -> Path:
        with (tmp_path / name).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, RUN, lineterminator=line_end)
            writer.writeheader()
            writer.writerows({**RUN, **change} for change in changes)
        return tmp_path / name

    return write_runs


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exception is None, result.output
    return result


def answers(file: Path, tmp_path: Path, *arguments: object) -> list[dict[str, str]]:
    run(file, "--out", tmp_path / "out.csv", *arguments)
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_row_that_can_be_compared(write: Write, tmp_path: Path) -> None:
    (row,) = answers(write({}), tmp_path)
    assert tuple(row) == COLUMNS
    assert float(row["error_pct"]) == pytest.approx(100 * (float(row["predicted_step_time_s"]) / 0.9 - 1), abs=0.01)
    assert row["fits"] == "true"
    assert row["unsupported_reason"] == ""


def test_an_unknown_stack_is_generic_and_says_so(write: Write, tmp_path: Path) -> None:
    (row,) = answers(write({}), tmp_path)
    assert row["stack"].startswith("generic")


def test_a_row_without_a_measured_time_has_no_error(write: Write, tmp_path: Path) -> None:
    (row,) = answers(write({"step_time_s": ""}), tmp_path)
    assert row["error_pct"] == ""
    assert float(row["predicted_step_time_s"]) > 0
    assert "no row has a measured step time" in run(write({"step_time_s": ""})).output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "abacus"}, "abacus"),
        ({"hidden": "wide"}, "hidden"),
        ({"seq_len": ""}, "seq_len"),
        ({"tp": "3"}, "tp=3"),
        ({"precision": "int3"}, "int3"),
    ],
)
def test_a_row_that_cannot_be_modelled_says_why(
    write: Write, tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    bad, good = answers(write(change, {"id": "b"}), tmp_path)
    assert reason in bad["unsupported_reason"]
    assert bad["predicted_step_time_s"] == bad["fits"] == ""
    assert good["unsupported_reason"] == ""


@pytest.mark.parametrize("time", ["soon", "-1", "nan"])
def test_a_measured_time_that_is_none_is_told(write: Write, tmp_path: Path, time: str) -> None:
    row, _ = answers(write({"step_time_s": time}, {"id": "b"}), tmp_path)
    assert row["unsupported_reason"].startswith("not compared")
    assert float(row["predicted_step_time_s"]) > 0


@pytest.mark.parametrize("change", [{"step_time_s": "soon"}, {"gpu": "abacus"}])
def test_a_file_without_a_row_that_can_be_used_is_an_error(write: Write, change: dict[str, str]) -> None:
    result = CliRunner().invoke(command, [str(write(change))])
    assert isinstance(result.exception, ConfigError)
    assert "none of its 1 rows can be used" in str(result.exception)


def test_windows_line_ends_change_nothing(write: Write, tmp_path: Path) -> None:
    plain = answers(write({}), tmp_path)
    assert answers(write({}, line_end="\r\n"), tmp_path) == plain


@pytest.mark.parametrize(
    ("changes", "message"), [([], "no row"), ([{}, {}], "several rows of one id"), ([{"id": ""}], "id is empty")]
)
def test_files_whose_rows_have_no_names_of_their_own_are_refused(
    write: Write, changes: list[dict[str, str]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_runs(write(*changes))


@pytest.mark.parametrize("content", [b"", b"one,two\n1,2\n", b"\xff\xfe\x00junk"])
def test_files_of_something_else_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.csv").write_bytes(content)
    with pytest.raises(ConfigError, match="other"):
        load_runs(tmp_path / "other.csv")


def test_a_folder_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_runs(path)


def test_json_holds_scores_and_predictions(write: Write) -> None:
    record = json.loads(run(write({}), "--json").stdout)
    (report,) = record["backtests"]
    assert report["overall"]["num_runs"] == len(record["predictions"]) == 1


def test_given_runs_calibrate_their_own_stack_and_no_other(write: Write, tmp_path: Path) -> None:
    others = [{"id": "x"}, {"id": "y", "stack": "llm-foundry-2023"}]
    x_before, y_before = answers(write(*others), tmp_path)
    slow = str(1.3 * float(x_before["predicted_step_time_s"]))
    mine = write(*({"id": f"mine-{index}", "step_time_s": slow} for index in range(5)), name="mine.csv")
    x_after, y_after = answers(write(*others), tmp_path, "--given", mine)
    assert y_after == y_before
    assert x_after["stack"] == "my-stack-2026"
    ratio = float(x_after["predicted_step_time_s"]) / float(x_before["predicted_step_time_s"])
    assert 1.1 < ratio < 1.3


def test_more_given_runs_that_agree_narrow_the_interval(write: Write) -> None:
    (found,) = predict_runs(load_runs(write({})))
    times = [{"id": str(index), "step_time_s": str(found.predicted_step_time_s)} for index in range(8)]
    few = calibrate_given([write(*times[:2], name="few.csv")])["my-stack-2026"]
    many = calibrate_given([write(*times, name="many.csv")])["my-stack-2026"]
    assert many.relative_error < few.relative_error
    assert many.multipliers == pytest.approx((1.0, 1.0, 1.0), abs=0.01)


def test_given_runs_that_nothing_can_be_compared_with_are_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match="step_time_s"):
        calibrate_given([write({"step_time_s": ""})])
    with pytest.raises(ConfigError, match="abacus"):
        calibrate_given([write({"gpu": "abacus"})])


def test_constants_are_not_fitted_on_a_handful_of_runs(write: Write) -> None:
    result = CliRunner().invoke(command, [str(write({})), "--folds"])
    assert isinstance(result.exception, ConfigError)
    assert "--folds" in str(result.exception)


def prediction(name: str, source: str, predicted_s: float, measured_s: float = 1.0) -> Prediction:
    return Prediction(
        id=name,
        source=source,
        stack="generic",
        predicted_step_time_s=predicted_s,
        measured_step_time_s=measured_s,
        relative_error=0.1,
        null_step_time_s=2.0,
    )


def test_sources_count_equally_and_small_ones_are_pooled() -> None:
    many = [prediction(f"m{index}", "many", 1.09) for index in range(30)]
    four = [prediction(f"f{index}", "four", 0.8) for index in range(4)]
    small = [prediction("s", "single", 1.3), prediction("p", "pair", 1.3), prediction("q", "pair", 1.3)]
    found = {score.name: score for score in scores([*many, *four, *small])}
    assert {name: score.num_runs for name, score in found.items()} == {"many": 30, "four": 4, POOLED: 3}
    whole = overall(tuple(found.values()))
    assert whole is not None
    assert whole.num_runs == 37
    assert whole.median == pytest.approx((0.09 + 0.2 + 0.3) / 3)
    assert whole.bias == pytest.approx((0.09 - 0.2 + 0.3) / 3)
    assert whole.within_10 == pytest.approx(1 / 3)
    assert whole.coverage == pytest.approx(1 / 3)
    assert whole.null_median == pytest.approx(1.0)


def test_picking_counts_what_the_pick_loses(write: Write) -> None:
    runs = load_runs(
        write(*({"id": str(index), "micro_batch": str(2**index), "n_gpus": "8", "dp": "8"} for index in range(5)))
    )

    def picked(predicted: list[float], measured: list[float]) -> Any:
        pairs = zip(predicted, measured, strict=True)
        return picking_score(runs, [prediction(str(index), "mine", *pair) for index, pair in enumerate(pairs)])

    right = picked([1, 2, 3, 4, 5], [10, 20, 30, 40, 50])
    assert (right.num_groups, right.worst_regret, right.kendall_tau) == (1, 0.0, 1.0)
    reversed_ = picked([5, 4, 3, 2, 1], [10, 20, 30, 40, 50])
    assert (reversed_.worst_regret, reversed_.kendall_tau) == (4.0, -1.0)
    # Within 5 % is no order.
    assert picked([5, 4, 3, 2, 1], [1.0, 1.01, 1.02, 1.03, 1.04]).kendall_tau == 1.0


def test_picking_names_the_runs_that_stand_where_they_should_not(write: Write) -> None:
    names = [str(index) for index in range(6)]
    runs = load_runs(write(*({"id": name, "micro_batch": str(2 ** int(name)), "n_gpus": "8"} for name in names)))
    # The third is predicted to be the fastest of all; the others are in order.
    predicted, measured = [1.0, 2.0, 0.5, 3.0, 4.0, 5.0], [10.0, 20.0, 90.0, 30.0, 40.0, 50.0]
    pairs = zip(names, predicted, measured, strict=True)
    score = picking_score(runs, [prediction(name, "mine", one, other) for name, one, other in pairs])
    assert score is not None
    worst = score.most_misplaced[0]
    assert (worst.id, worst.num_wrong, worst.num_pairs) == ("2", 5, 5)
    assert worst.error == pytest.approx(0.5 / 90 - 1)
    assert score.kendall_tau == pytest.approx((10 - 5) / 15)
    assert score.tau_without_them == 1.0
