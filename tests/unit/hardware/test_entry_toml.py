"""What write makes of an entry, entry reads back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalogue_entries import SHIPPED
from meshwright.hardware import quantity
from meshwright.hardware.catalogue import load_cluster, load_device
from meshwright.hardware.entry import build_cluster, cluster_toml, device_toml, read_cluster_values, read_device


@pytest.mark.parametrize("name", SHIPPED["devices"])
def test_a_written_device_is_the_same_device(name: str, tmp_path: Path) -> None:
    device = load_device(name)
    file = tmp_path / f"{name}.toml"
    file.write_text(device_toml(device))
    assert read_device(file, name) == device


@pytest.mark.parametrize("name", SHIPPED["clusters"])
def test_a_written_cluster_is_the_same_cluster(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    file = tmp_path / f"{name}.toml"
    file.write_text(cluster_toml(cluster))
    assert build_cluster(file, name, read_cluster_values(file), cluster.device) == cluster


@given(st.floats(1e-9, 900))
def test_a_rounded_time_is_written_exactly(value: float) -> None:
    rounded = quantity.round_quantity(value, quantity.SECONDS)
    assert rounded == pytest.approx(value, rel=1e-3)
    assert quantity.parse_quantity(quantity.format_quantity(rounded, quantity.SECONDS), quantity.SECONDS) == rounded


@given(st.floats(1, 1e17), st.sampled_from(["FLOPS_PER_S", "BYTES_PER_S", "ELEMENTS_PER_S", "BYTES"]))
def test_a_rounded_rate_is_written_exactly(value: float, units: str) -> None:
    table = getattr(quantity, units)
    rounded = quantity.round_quantity(value, table)
    assert rounded == pytest.approx(value, rel=1e-3)
    assert quantity.parse_quantity(quantity.format_quantity(rounded, table), table) == rounded


@pytest.mark.parametrize(
    ("value", "units", "text"),
    [
        (450e9, quantity.BYTES_PER_S, "450 GB/s"),
        (0.8, quantity.SHARE, "80 %"),
        (7.0, quantity.FACTOR, "7 x"),
        (132.0, quantity.COUNT, 132),
        (2e-6, quantity.SECONDS, "2 us"),
    ],
)
def test_quantities_are_written_as_people_write_them(value: float, units: dict[str, float], text: str | int) -> None:
    assert quantity.format_quantity(value, units) == text
