"""What people write about hardware, in SI base units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hardware import quantity
from meshwright.hardware.quantity import parse_quantity


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("989 TFLOP/s", quantity.FLOPS_PER_S, 989e12),
        ("2.5 PFLOP/s", quantity.FLOPS_PER_S, 2.5e15),
        ("80 GB", quantity.BYTES, 80e9),
        ("80 GiB", quantity.BYTES, 80 * 2**30),
        ("81559 MiB", quantity.BYTES, 81559 * 2**20),
        ("3.35 TB/s", quantity.BYTES_PER_S, 3.35e12),
        ("400 Gb/s", quantity.BYTES_PER_S, 50e9),
        ("450GB/s", quantity.BYTES_PER_S, 450e9),
        ("2.7 us", quantity.SECONDS, 2.7e-6),
        ("700 W", quantity.WATTS, 700.0),
        (132, quantity.COUNT, 132.0),
    ],
)
def test_readable_units_become_base_units(text: object, units: dict[str, float], value: float) -> None:
    assert parse_quantity(text, units) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("989 TFLOPS", quantity.FLOPS_PER_S),
        ("80 gb", quantity.BYTES),
        ("80 GB", quantity.BYTES_PER_S),
        ("400 Gb/s", quantity.BYTES),
        ("3 minutes", quantity.SECONDS),
    ],
)
def test_an_unknown_unit_names_the_known_ones(text: str, units: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be one of") as error:
        parse_quantity(text, units)
    assert all(unit in str(error.value) for unit in units)


@pytest.mark.parametrize("text", [80, 80.0, "80", "", "GB", "-80 GB", "80 GB or so", None, ["80 GB"]])
def test_a_number_without_a_unit_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is no number with a unit"):
        parse_quantity(text, quantity.BYTES)


@pytest.mark.parametrize("text", ["132", 1.5, 0, -1, True, None])
def test_a_count_is_a_whole_number(text: object) -> None:
    with pytest.raises(ValueError, match="is no count"):
        parse_quantity(text, quantity.COUNT)


@given(st.integers(1, 10**6), st.sampled_from(sorted(quantity.BYTES_PER_S)))
def test_every_unit_scales_the_number(number: int, unit: str) -> None:
    scale = parse_quantity(f"1 {unit}", quantity.BYTES_PER_S)
    assert parse_quantity(f"{number} {unit}", quantity.BYTES_PER_S) == pytest.approx(number * scale, rel=1e-12)


def test_bits_are_an_eighth_of_bytes() -> None:
    assert parse_quantity("8 Gb/s", quantity.BYTES_PER_S) == parse_quantity("1 GB/s", quantity.BYTES_PER_S)
