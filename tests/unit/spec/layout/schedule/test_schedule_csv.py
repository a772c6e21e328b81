"""A schedule from a file is taken as it stands, or refused with the place and the cure."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError, InfeasibleLayout
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import COMPUTE_KINDS, Action, orders_from_csv, orders_to_csv, read_schedule
from meshwright.spec.layout.schedule.schedule import build_schedule

FILE = Layout(pp=2, schedule="mine.csv", dp_shard=3, microbatch_size=2)
GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
actions = st.builds(Action, st.sampled_from(COMPUTE_KINDS), st.integers(0, 99), st.integers(0, 99))


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.lists(actions, min_size=1), min_size=1))
def test_what_is_written_is_read_back(orders: list[list[Action]]) -> None:
    assert orders_from_csv(orders_to_csv(orders)) == tuple(tuple(order) for order in orders)


def test_bubbles_pairs_and_line_ends_of_a_file_mean_nothing() -> None:
    plain = orders_from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert orders_from_csv(GOOD) == plain
    assert orders_from_csv(GOOD.replace("\n", "\r\n") + "\n") == plain
    assert orders_from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,(1F1;1B1)OVERLAP_F_B\n") == plain


def test_a_layout_names_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(GOOD)
    layout = FILE.replace(schedule=str(file))
    assert build_schedule(layout, 2, read_schedule(layout)).actions == orders_from_csv(GOOD)
    assert read_schedule(layout.replace(schedule="1F1B")) is None


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"0F0,\xe9")
    for name in ("none.csv", "latin.csv"):
        layout = FILE.replace(schedule=str(tmp_path / name))
        with pytest.raises(
            ConfigError, match=rf'^layout\.schedule = ".*{name}" cannot be read \(.*: name an existing CSV file'
        ):
            read_schedule(layout)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD.replace("1B1", "1Q1"), "row 2, column 5: '1Q1' is no action of a pipeline"),
        (GOOD.replace("1B1", "1SEND_B1"), "row 2, column 5: 1SEND_B1 is a transfer, but a schedule's file holds "
         "F, B, I, W only: leave it out"),
        (GOOD.replace(",1B1", ""), "stage 1 runs microbatch 1 F 1 times, B 0 times"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "no pipeline rank can go on"),
        ("", "it holds no action"),
        ("\n,,\n", "it holds no action"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_hold(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf'^layout\.schedule = "mine\.csv": {re.escape(problem)}'):
        build_schedule(FILE, 2, text)


@pytest.mark.parametrize(
    ("layout", "num_microbatches", "text", "problem"),
    [
        (FILE.replace(pp=4), 2, GOOD, "2 rows, one for each pipeline rank, but layout.pp = 4: set layout.pp to 2"),
        (FILE.replace(virtual_stages=2), 2, GOOD, "row 1 has 1 stages, but layout.virtual_stages = 2: set "
         "layout.virtual_stages to 1"),
        (FILE, 3, GOOD, "runs 2 microbatches, but a step has 3: set train.global_batch_size to 12, or change "
         "layout.microbatch_size = 2"),
    ],
)  # fmt: skip
def test_a_file_has_to_fit_the_layout(layout: Layout, num_microbatches: int, text: str, problem: str) -> None:
    with pytest.raises(InfeasibleLayout, match=re.escape(problem)):
        build_schedule(layout, num_microbatches, text)
