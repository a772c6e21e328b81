"""What scoring the reference takes: the forward of a step, for as many sequences as the pairs fill."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_job
from meshwright.data.dataset import build_dataset
from meshwright.data.examine.pair_counts import count_pairs
from meshwright.data.packing.pair_dataset import PairDataset
from meshwright.planner.candidate import judge
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.reference_scoring import scoring_s
from meshwright.spec.layout.layout import Layout
from repository import ROOT

EXAMPLE = ROOT / "examples" / "tiny-dpo.toml"


def scoring_and_step(layout: Layout, num_sequences: int, *overrides: str) -> tuple[float, float]:
    """Return the seconds of scoring so many sequences, and of a step of 16 without recomputation, of llama3-8b."""
    words = ("model.source=llama3-8b", "train.seq_len=4096", "train.global_batch_size=16", "precision.compute=bfloat16")
    request = plan_request(load_job(EXAMPLE, (*words, *overrides)), Options("h100-ib400:8"))
    candidate = judge(layout, request)
    return scoring_s(candidate, request, num_sequences), candidate.estimate.step.total_s


def test_a_third_of_a_step_without_recomputation() -> None:
    scored, step_s = scoring_and_step(Layout(dp_shard=8), 16)
    assert scored == pytest.approx(step_s / 3, rel=0.05)
    assert scoring_and_step(Layout(dp_shard=8, activation_checkpoint="full"), 16)[0] == pytest.approx(scored, rel=0.02)


def test_half_of_a_step_that_trains_an_adapter() -> None:
    scored, step_s = scoring_and_step(Layout(dp_shard=8), 16, "adapter.kind=lora")
    assert scored == pytest.approx(step_s / 2, rel=0.1)


def test_it_grows_with_the_sequences_whose_last_are_padding() -> None:
    one, two, more = (scoring_and_step(Layout(dp_shard=8), number)[0] for number in (8, 16, 17))
    assert two == pytest.approx(2 * one)
    assert more == pytest.approx(3 * one)


@pytest.mark.parametrize("packing", ["whole", "none"])
@pytest.mark.parametrize("seq_len", [150, 256])
def test_pairs_are_counted_as_the_run_packs_them(tmp_path: Path, packing: str, seq_len: int) -> None:
    changes = {"packing": packing, "too_long": "skip", "cache_dir": str(tmp_path), "validation_fraction": 0.0}
    section = load_job(EXAMPLE).job.data.replace(**changes)
    dataset = build_dataset(section, seq_len, "dpo")
    assert isinstance(dataset, PairDataset)
    assert count_pairs(section, seq_len) == (dataset.num_pairs, dataset.num_training_samples, False)
