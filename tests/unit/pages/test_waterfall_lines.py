"""A measured waterfall in words: what it is of, how far it is from its floor, and what would save most."""

from __future__ import annotations

import pytest

from meshwright.pages.console import page_console, print_page
from meshwright.pages.tables.waterfall import bar
from meshwright.pages.tables.waterfall_lines import change_words, short_lines, waterfall_page
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.spec.step.step_waterfall import BestChange, Waterfall

MEASURED = StepDecomposition(
    model_flops_at_peak_s=0.2, gemm_inefficiency_s=0.3, dp_communication_s=0.2, cpu_bound_s=0.1, stragglers_s=0.2
)
PREDICTED = StepDecomposition(model_flops_at_peak_s=0.2, gemm_inefficiency_s=0.2, dp_communication_s=0.3)
BLOCKS = "█▏▎▍▌▋▊▉"
CHANGE = BestChange(change="layout.microbatch_size=4", step_s=0.5, saved_s=0.2, error_s=0.1)


def found(**changes: object) -> Waterfall:
    fields = {
        **{
            "measured": MEASURED,
            "predicted": PREDICTED,
            "source": "profile",
            "measured_s": 0.8,
            "timed": "steps 4 to 6",
        },
        **{"step": 8, "num_steps": 3, "rank": 1, "num_ranks": 2, "relative_error": 0.15, "changes": (CHANGE,)},
    }
    return Waterfall.model_validate(fields | changes)


def page_of(waterfall: Waterfall, capsys: pytest.CaptureFixture[str]) -> str:
    print_page(page_console(80, force_jupyter=False), waterfall_page(waterfall, "do this"))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_each_cause_has_a_line_and_the_profiler_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = page_of(found(), capsys)
    lines = [" ".join(line.translate(dict.fromkeys(map(ord, BLOCKS))).split()) for line in text.splitlines()]
    assert "GEMM inefficiency 200 ms 300 ms +100 ms" in lines
    assert "stragglers - 200 ms +200 ms" in lines
    assert "step, profiled 700 ms 1 s +300 ms" in lines
    assert "profiler, and noise -200 ms" in lines
    assert "step, median 800 ms" in lines
    words = " ".join(text.split())
    assert "step 8, the median of 3 profiled, of rank 1, the critical one" in words
    assert "4.0 times the model FLOPs at peak" in words
    assert "layout.microbatch_size=4, predicted to save 200 ms of the predicted step (29 %)" in words


def test_the_stage_of_a_pipeline_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "of rank 1, pipeline rank 1, the critical one" in " ".join(page_of(found(pipeline_rank=1), capsys).split())


def test_without_a_profile_the_page_says_so_and_draws_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    timers = found(source="timers", measured=StepDecomposition(compute_s=0.7, data_loading_s=0.1), step=None)
    text = page_of(timers, capsys)
    assert "no step was profiled" in " ".join(text.split())
    assert "The causes are predicted, not measured." in " ".join(text.split())
    unpriced = page_of(timers.replace(predicted=None, changes=()), capsys)
    assert "predicted, not measured" not in unpriced, "there are no causes"
    assert "do this" in text
    assert "data wait" in text
    assert "profiler, and noise" not in text


def test_a_change_within_the_error_of_the_formulas_is_no_advice() -> None:
    small = CHANGE.replace(saved_s=0.05)
    [words] = change_words(found(changes=(small,)))
    assert words == "No change of one key is predicted to save more than the error of the prediction (±100 ms)."
    [words] = change_words(found(changes=()))
    assert "No change of one layout key" in words
    assert not list(change_words(found(predicted=None, changes=())))
    numerics = small.replace(changes_numerics=True, change="precision.float8=rowwise")
    [words] = change_words(found(changes=(small, numerics)))
    assert "float8" not in words


def test_no_advice_saves_more_than_the_step_or_less_than_the_prediction_is_wrong_by() -> None:
    [words] = change_words(found(measured_s=0.19))
    assert words == (
        "No change of one key is advised: layout.microbatch_size=4 is predicted to save 200 ms, and the whole step "
        "takes 190 ms."
    )
    [words] = change_words(found(measured_s=2.0))
    assert words == "No change of one key is predicted to save more than the error of the prediction (±1.3 s)."
    assert len(list(short_lines(found(measured_s=2.0), "do this"))) == 2


def test_a_change_of_numerics_is_a_sentence_of_its_own() -> None:
    lower = BestChange(change="precision.float8=rowwise", step_s=0.4, saved_s=0.3, error_s=0.1, changes_numerics=True)
    kept, numerics = change_words(found(changes=(CHANGE, lower)))
    assert "layout.microbatch_size=4" in kept
    assert numerics.startswith("With other numerics: precision.float8=rowwise, predicted to save 300 ms")


def test_the_end_of_a_log_has_three_lines_at_most() -> None:
    lines = list(short_lines(found(), "do this"))
    assert len(lines) == 3
    assert lines[0].startswith(
        "where the step goes (profiled, rank 1): model FLOPs at peak 200 ms, GEMM inefficiency 300 ms"
    )
    assert lines[1] == "step 800 ms measured (median of steps 4 to 6), 700 ms predicted"
    assert "layout.microbatch_size=4" in lines[2]
    timers = found(source="timers", measured=StepDecomposition(compute_s=0.8))
    assert "predicted: no step was profiled" in next(iter(short_lines(timers, "do this")))
    own = found(source="timers", measured=StepDecomposition(compute_s=0.8), predicted=None, changes=())
    assert list(short_lines(own, "do this")) == ["step 800 ms (median of steps 4 to 6); by cause: do this"]


def test_a_machine_that_is_not_calibrated_gets_no_advice_in_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    example = found(rates_of="one of 2 ranks of a laptop", is_floor_lowered=True)
    assert len(list(short_lines(example, "do this"))) == 2
    words = " ".join(page_of(example, capsys).split())
    assert "This machine is not calibrated" in words
    assert "Kernels were faster than the peak" in words
    assert "4.0 times the model FLOPs at peak of the example machine" in words
    assert "No change of a key is advised" in words
    assert CHANGE.change not in words


def test_a_longer_time_has_no_shorter_bar() -> None:
    for start_s in (0.0, 0.04, 0.36, 0.5):
        lengths = [len(bar(start_s, start_s + 0.01 * n, 1.0, 14).split("[/]")[1]) for n in range(1, 45)]
        assert lengths == sorted(lengths)
        assert all(len(bar(start_s, start_s + 0.01 * n, 1.0, 14)) <= 14 + len("[dim][/]") for n in range(1, 50))


def test_only_the_column_that_is_drawn_has_bars(capsys: pytest.CaptureFixture[str]) -> None:
    timers = found(source="timers", measured=StepDecomposition(compute_s=0.7, data_loading_s=0.1), step=None)
    lines = page_of(timers, capsys).splitlines()
    [unknown] = [line for line in lines if "not distinguished" in line]
    assert not set(BLOCKS) & set(unknown)
    assert "as predicted" in lines[0]


def test_other_communication_is_explained_where_there_is_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Other communication:" not in page_of(found(), capsys)
    measured = MEASURED.model_copy(update={"other_communication_s": 0.1})
    words = " ".join(page_of(found(measured=measured, num_ranks=1), capsys).split())
    assert "Other communication: copies between the memories of host and device" in words
    assert "which one rank calls too" in words
