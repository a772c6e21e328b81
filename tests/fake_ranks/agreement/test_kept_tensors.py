"""More recomputation keeps less of a traced step, under any layout."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec.layout.layout import Layout
from meshwright.tracer.programs.trace_ranks import trace
from repository import ROOT
from trained_step import BUILD, arguments_of

EXAMPLES = ROOT / "examples"
CASES = [
    pytest.param("tiny.toml", {"tp": 4}, id="tp"),
    pytest.param("tiny.toml", {"tp": 4, "compile": True}, id="tp-compiled", marks=pytest.mark.long),
    pytest.param("tiny.toml", {"tp": 2, "cp": 2, "dp_shard": 2}, id="tp-cp", marks=pytest.mark.long),
    pytest.param("tiny.toml", {"tp": 2, "pp": 2}, id="tp-pp", marks=pytest.mark.long),
    pytest.param("tiny-moe.toml", {"tp": 2, "ep": 2, "etp": 2, "dp_shard": 2}, id="tp-etp", marks=pytest.mark.long),
    pytest.param("tiny-moe.toml", {"tp": 2, "ep": 4, "dp_shard": 2}, id="tp-ep", marks=pytest.mark.long),
]


def peak_bytes(job: str, keys: dict[str, Any], policy: str) -> int:
    """Return the most bytes that the first rank has at once."""
    layout = Layout(**keys)
    texts = [f"layout.{name}={str(value).lower()}" for name, value in keys.items()]
    sizes = (
        "model.options.num_layers=2",
        "train.seq_len=1024",
        f"train.global_batch_size={2 * layout.dp * layout.pp}",
        "precision.compute=bfloat16",
    )
    found = trace(
        BUILD,
        0,
        layout.num_ranks,
        arguments_of(str(EXAMPLES / job), *sizes, *texts, f"layout.activation_checkpoint={policy}"),
    )
    return int(found.live_bytes().max())


@pytest.mark.long
@pytest.mark.parametrize(("job", "keys"), CASES)
def test_more_recomputation_keeps_less(job: str, keys: dict[str, Any]) -> None:
    none, selective, full = (peak_bytes(job, keys, policy) for policy in ("none", "selective", "full"))
    assert full <= selective <= none
