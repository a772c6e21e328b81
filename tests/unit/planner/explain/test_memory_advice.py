"""The one key whose change frees enough, as the planner predicts it for a rank that ran out of memory."""

from __future__ import annotations

import pytest

from meshwright.errors import UnsupportedError
from meshwright.planner.explain.memory_advice import memory_advice
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import parse_layout
from meshwright.units import GiB


def _job(**sections: object) -> Job:
    return Job.from_dict(
        {
            "model": {"source": "llama3-8b"},
            "train": {"seq_len": 8192, "global_batch_size": 16},
            "precision": {"compute": "bfloat16"},
            "cluster": {"name": "h100-ib400"},
            **sections,
        }
    )


def _changed(layout: Layout, change: str) -> Layout:
    """Return the layout with the keys of `change`; a degree takes its ranks from dp_shard."""
    other = parse_layout(change)
    keys = [pair.partition("=")[0] for pair in change.split(",")]
    changed = layout.replace(**{key: getattr(other, key) for key in keys})
    return changed.replace(dp_shard=changed.dp_shard * layout.num_ranks // changed.num_ranks)


@pytest.mark.slow
def test_the_fastest_change_that_frees_enough_is_named() -> None:
    layout = Layout(dp_shard=8, microbatch_size=2, compile=True)
    little, much = (memory_advice(_job(), layout, 0, missing * GiB, "cuda") for missing in (1, 40))
    for advice, missing in ((little, 1), (much, 40)):
        assert advice.smaller is not None
        assert advice.smaller.memory_bytes <= advice.memory_bytes - missing * GiB
        # The layout with the change alone is predicted to be what the advice says.
        changed = _changed(layout, advice.smaller.change)
        again = memory_advice(_job(), changed, 0, 0, "cuda")
        assert (again.memory_bytes, again.step_s) == (advice.smaller.memory_bytes, advice.smaller.step_s)
    assert little.smaller is not None
    assert much.smaller is not None
    assert little.smaller.step_s <= much.smaller.step_s


@pytest.mark.slow
def test_states_leave_the_device_where_that_is_the_fastest_that_frees_enough() -> None:
    layout = Layout(dp_shard=8, activation_checkpoint="full", loss_chunks=8)
    advice = memory_advice(_job(), layout, 0, 4 * GiB, "cuda")
    assert advice.smaller is not None
    assert (advice.smaller.section, advice.smaller.change) == ("memory", "optimizer_state=uvm")
    assert advice.smaller.memory_bytes <= advice.memory_bytes - 4 * GiB


def test_what_cannot_be_priced_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="class of your own"):
        memory_advice(_job(model={"source": "mine:Model"}), Layout(), 0, 0, "cuda")
