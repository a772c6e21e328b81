"""What a step's row and line hold."""

from meshwright.trainer.metrics import StepMetrics

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
}


def test_a_dense_model_has_no_word_of_experts() -> None:
    metrics = StepMetrics(**DENSE)
    assert metrics.row() == DENSE
    assert "skew" not in metrics.line(10, None, 1.0)


def test_experts_add_numbers_of_their_own_to_the_row() -> None:
    experts = {"router_skew": 1.5, "router_skew_mean": 1.2, "tokens_dropped": 0.0, "tokens_padded": 0.0}
    metrics = StepMetrics(**DENSE, experts=experts)
    assert metrics.row() == DENSE | experts
    assert "| router skew 1.50 |" in metrics.line(10, None, 1.0)
