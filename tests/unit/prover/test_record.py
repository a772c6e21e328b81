"""The data of a proof: samples ignore unequal numbers of targets, and one at least counts in each."""

from __future__ import annotations

from pathlib import Path

from meshwright.data.dataset import build_dataset
from meshwright.data.numbered_samples import IGNORED
from meshwright.data.packing.pair_dataset import PairDataset
from meshwright.data.token_dataset import TokenDataset
from meshwright.prover.record import WithIgnoredTargets
from meshwright.prover.small_job import write_corpus
from meshwright.spec.job.sections import DataSection


def test_pairs_of_a_proof_can_all_be_learned(tmp_path: Path) -> None:
    write_corpus(tmp_path / "sums.jsonl")
    section = DataSection(source=str(tmp_path / "sums.jsonl"), cache_dir=str(tmp_path), mask_documents=True)
    dataset = build_dataset(section.replace(packing="whole", too_long="skip"), 32, "dpo")
    assert isinstance(dataset, PairDataset)
    assert dataset.num_pairs == len((tmp_path / "sums.jsonl").read_text().splitlines())


def test_samples_ignore_unequal_numbers_of_targets(tmp_path: Path) -> None:
    write_corpus(tmp_path / "sums.jsonl")
    section = DataSection(source=str(tmp_path / "sums.jsonl"), cache_dir=str(tmp_path), validation_fraction=0.0)
    plain = build_dataset(section, 32)
    assert isinstance(plain, TokenDataset)
    dataset = WithIgnoredTargets(plain, 32)
    assert (dataset.may_ignore_targets, plain.may_ignore_targets) == (True, False)
    counts = [int((dataset.sample(index)[1] != IGNORED).sum()) for index in range(8)]
    assert len(set(counts)) == 8
    assert min(counts) >= 1
    for index in range(8):
        inputs, targets = dataset.sample(index)
        expected_inputs, expected = plain.sample(index)
        assert (inputs == expected_inputs).all()
        assert (targets[targets != IGNORED] == expected[targets != IGNORED]).all()
