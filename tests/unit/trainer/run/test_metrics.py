"""What a step's row and line hold."""

from meshwright.trainer.run.run_recorder import StepMetrics

DENSE = {
    "step": 1,
    "loss": 2.0,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "samples_per_s": 4.0,
    "tokens_per_s": None,
    "step_ms": 10.0,
    "data_wait_ms": 0.1,
    "memory_bytes": 2**20,
    "mfu": None,
    "attempt": 1,
    "time_s": 1.8e9,
}


def test_a_dense_model_has_no_word_of_experts() -> None:
    metrics = StepMetrics(**DENSE)
    assert metrics.row() == DENSE
    assert "skew" not in metrics.line(10, 1.0)


def test_a_row_says_that_its_step_was_skipped() -> None:
    assert StepMetrics(**DENSE, decision="skip").row() == DENSE | {"decision": "skip"}


def test_experts_add_numbers_of_their_own_to_the_row() -> None:
    experts = {"router_skew": 1.5, "router_skew_mean": 1.2, "tokens_dropped": 0.0, "tokens_padded": 0.0}
    metrics = StepMetrics(**DENSE, experts=experts)
    assert metrics.row() == DENSE | experts
    assert "  skew 1.50  " in metrics.line(10, 1.0)


def test_the_line_fits_100_columns_and_names_units() -> None:
    fields = {"step": 19_999, "tokens_per_s": 621.0, "step_ms": 825.0, "memory_bytes": 395 * 2**20, "grad_norm": 1.734}
    line = StepMetrics(**DENSE | fields).line(20_000, 65.0)
    for part in ("step 19999/20000", "loss 2.0000", "gnorm 1.734", "621 tok/s", "825 ms", "mem 395 MiB", "eta 0:01:05"):
        assert part in line
    assert len(line) <= 100
    assert "data" not in line
    assert "data 25 ms" in StepMetrics(**DENSE | fields | {"data_wait_ms": 25.0}).line(20_000, 65.0)


def test_the_line_of_a_large_run_leaves_out_what_does_not_fit() -> None:
    large = {"step": 999_999, "tokens_per_s": 987e6, "step_ms": 12_345.0, "mfu": 0.4321, "data_wait_ms": 999.0}
    line = StepMetrics(**DENSE | large, experts={"router_skew": 12.34}).line(1_000_000, 86_400.0)
    for part in (
        "step 999999/1000000",
        "loss 2.0000",
        "gnorm 1.000",
        "987M tok/s",
        "12345 ms",
        "data 999 ms",
        "MFU 43.2%",
    ):
        assert part in line
    assert len(line) <= 100
    assert "eta" not in line
