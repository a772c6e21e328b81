"""Save, load on another layout, save, and so on, back to the first layout: each bit is as it was."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hand_made
from meshwright.checkpoint.checkpoint import load, save
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout of 8 ranks or fewer, with experts and stages in any way that the hand-made parameters allow."""
    degrees: dict[str, int] = {}
    for axis in draw(st.lists(st.sampled_from(("dp_shard", "dp_replicate", "tp", "pp")), max_size=3)):
        degrees[axis] = 2 * degrees.get(axis, 1)
    degrees["pp"] = min(degrees.get("pp", 1), hand_made.NUM_STAGES)
    shards = degrees.get("dp_shard", 1) * degrees.get("tp", 1)
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if shards % n == 0]))
    schedule = draw(st.sampled_from(("1F1B", "ZBVZeroBubble"))) if degrees["pp"] == 2 else "1F1B"
    return Layout(**degrees, ep=ep, schedule=schedule)


def load_and_save(source: Path | None, target: Path, layout: Layout) -> None:
    """Save the state that `source` holds, checked, or the first one."""
    state = hand_made.state(layout, factor=1.0 if source is None else 0.0)
    if source is not None:
        load(source, state)
        hand_made.assert_state(state)
    save(target, state, {"step": 1})


def walk(chain: list[Layout]) -> None:
    """Save on the first layout, load and save on each of the others and on the first again, and compare files."""
    folder = Path(tempfile.mkdtemp())
    folders = [folder / f"{number}" / "step-1" for number in range(len(chain) + 1)]
    for source, target, layout in zip([None, *folders], folders, [*chain, chain[0]], strict=False):
        run_ranks(load_and_save, math.prod((layout.pp, layout.dp, layout.tp)), source, target, layout)
    first, last = ({path.name: path.read_bytes() for path in each.glob("*.bin")} for each in (folders[0], folders[-1]))
    assert first == last
    shutil.rmtree(folder)


@pytest.mark.long
def test_a_chain_of_every_axis_returns_every_bit() -> None:
    walk(
        [
            Layout(dp_shard=2, tp=2, ep=4),
            Layout(pp=2, dp_replicate=2, schedule="ZBVZeroBubble"),
            Layout(),
        ]
    )


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(st.lists(layouts(), min_size=2, max_size=5))
def test_any_chain_returns_every_bit(chain: list[Layout]) -> None:
    walk(chain)
