"""Layouts whose attention another backend computes train as one process does under `auto`, with masks, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import parse_layout
from recorded_jobs import require_as_one_process, sums_job

pytestmark = DYNAMO_WARNINGS

MASKED: dict[str, list[str]] = {
    "two ranks": [
        "tp=2,attention_backend=flex",
        "pp=2,attention_backend=math",
    ],
    "one": ["attention_backend=flex", "attention_backend=math,activation_checkpoint=selective"],
    "more of two": [
        "pp=2,attention_backend=flex,activation_checkpoint=full",
        "dp_shard=2,attention_backend=flex,compile=true,compile_backend=aot_eager",
        "dp_shard=2,attention_backend=math,compile=true,compile_backend=aot_eager",
        "cp=2,cp_method=ulysses,attention_backend=flex",
        "cp=2,cp_method=ulysses,attention_backend=math",
    ],
    "four": [
        "tp=2,cp=2,cp_method=ulysses,attention_backend=flex",
        "pp=2,tp=2,schedule=Interleaved1F1B,attention_backend=flex",
        "pp=2,dp_shard=2,schedule=ZBVZeroBubble,attention_backend=math",
    ],
}
"""Layouts of a model with documents and a window, by a name for their ranks."""
PLAIN = ["tp=2,attention_backend=flash", "cp=2,cp_method=ulysses,attention_backend=flash"]
"""Those of one without, since flash attention takes no mask."""


def _require_equal(folder: Path, texts: list[str], *, is_masked: bool) -> None:
    layouts = [Layout(), *(parse_layout(text) for text in texts)]
    sizes = {"sliding_window": 9} if is_masked else {}
    alone, *jobs = [sums_job(folder, layout, sizes, is_masked=is_masked) for layout in layouts]
    require_as_one_process(jobs, [alone], layouts[1].num_ranks)


@pytest.mark.parametrize(
    "ranks", [pytest.param(name, marks=() if name == "two ranks" else pytest.mark.long) for name in MASKED]
)
def test_backends_under_masks_train_as_auto_does(tmp_path: Path, ranks: str) -> None:
    _require_equal(tmp_path, MASKED[ranks], is_masked=True)


@pytest.mark.long
def test_flash_trains_as_auto_does(tmp_path: Path) -> None:
    _require_equal(tmp_path, PLAIN, is_masked=False)
