"""What is told about every key holds for every key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.key_problems import nearest_allowed, value_text
from meshwright.config.keys import Key, job_keys

KEYS = list(job_keys().values())
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.floats(), max_size=3),
    st.sampled_from(["1e-3", "4M", "true", "no", "BF16", "gpu", "COSINE", "-1"]),
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.dotted)
def test_every_key_says_what_it_means_and_must_be(key: Key) -> None:
    assert key.meaning.endswith(".")
    assert len(key.meaning) < 130
    assert key.rule
    assert key.accepts(key.default)
    assert key.example is not None or not key.is_optional, "an optional key needs examples=[...] for init"


@pytest.mark.parametrize(("value", "meant"), [(0.5, 1), (2.5, 3), (-3, 0), (50.0, 50)])
def test_part_of_an_interval_is_rounded_up(value: float, meant: int) -> None:
    """0 steps between two checkpoints means none at all."""
    assert nearest_allowed(job_keys()["checkpoint.interval"], value) == meant


@pytest.mark.slow
@given(st.sampled_from(KEYS), VALUES)
def test_a_suggestion_is_always_allowed(key: Key, value: object) -> None:
    repair = nearest_allowed(key, value)
    assert repair is None or key.accepts(repair)


@pytest.mark.parametrize(
    ("dotted", "value", "repair"),
    [
        ("train.steps", "100", 100),
        ("train.steps", 100.0, 100),
        ("train.steps", -5, 5),
        ("train.seed", -5, 0),
        ("train.steps", 2.5, 3),
        ("layout.compile", "yes", True),
        ("layout.compile", 0, False),
        ("layout.activation_checkpoint", True, "full"),
        ("layout.activation_checkpoint", "Full", "full"),
        ("layout.reshard_after_forward", False, "never"),
        ("run.device", "gpu", "cuda"),
        ("precision.compute", "bf16", "bfloat16"),
        ("precision.compute", "fp32", "float32"),
        ("precision.compute", "fp16", "bfloat16"),
        ("precision.compute", "float7", None),
        ("optimizer.name", "AdamW", "adamw"),
        ("optimizer.name", "sgd", None),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", 0, None),
        ("data.validation_fraction", 5, 0.05),
        ("data.validation_fraction", 7, 0.07),
        # A share that is too large is no percent.
        ("dpo.label_smoothing", 0.7, None),
        ("dpo.label_smoothing", 10, 0.1),
        ("data.validation_fraction", 1.5, None),
        ("run.timeout_s", float("inf"), None),
    ],
)
def test_the_nearest_allowed_value(dotted: str, value: object, repair: object) -> None:
    found = nearest_allowed(job_keys()[dotted], value)
    assert found == repair
    assert type(found) is type(repair)


@given(st.sampled_from(KEYS), VALUES)
def test_every_wrong_value_has_a_message_of_one_line(key: Key, value: object) -> None:
    if value is not None and not key.accepts(value):
        text = value_text(key.dotted, value)
        assert text.startswith(f"{key.dotted} = ")
        assert f" must be {key.rule}: " in text
        assert "\n" not in text


@pytest.mark.parametrize("name", ["float8", "fp8-rowwise", "MXFP8", "nvfp4"])
def test_formats_of_matmuls_are_said_to_be_another_key(name: str) -> None:
    assert value_text("precision.compute", name).endswith(
        'float8 matmuls are precision.float8 = "tensorwise", "rowwise", "rowwise_with_gw_hp" or "mxfp8" '
        'next to precision.compute = "bfloat16"; formats of 4 bits are not built'
    )
