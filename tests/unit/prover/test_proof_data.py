"""Data of a proof: the job's own conversations and pairs; samples of text that ignore unequal numbers of targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.config.load import load_job
from meshwright.data.dataset import build_dataset
from meshwright.data.numbered_samples import IGNORED
from meshwright.data.packing.pair_dataset import PairDataset
from meshwright.data.token_dataset import TokenDataset
from meshwright.prover.proof_data import WithIgnoredTargets, proof_dataset, write_corpus
from meshwright.prover.small_job import small_job
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection
from meshwright.spec.layout.layout import Layout
from repository import ROOT


def test_pairs_of_a_proof_can_all_be_learned(tmp_path: Path) -> None:
    write_corpus(tmp_path / "sums.jsonl")
    section = DataSection(source=str(tmp_path / "sums.jsonl"), cache_dir=str(tmp_path), mask_documents=True)
    dataset = build_dataset(section.replace(packing="whole", too_long="skip"), 128, "dpo")
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


def own_job(task: str, folder: Path, **data: Any) -> tuple[Job, Job]:
    """Return an example of fine-tuning, and the small job that proves it."""
    job = load_job(ROOT / "examples" / f"tiny-{task}.toml").job
    job = job.replace(data=job.data.replace(cache_dir=str(folder / "cache"), validation_fraction=0.0, **data))
    write_corpus(folder / "sums.jsonl")
    return job, small_job(job, [Layout(dp_shard=2)], folder / "sums.jsonl", 3, "float64").job


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_fine_tuning_job_is_proven_on_its_own_rows(task: str, tmp_path: Path) -> None:
    job, small = own_job(task, tmp_path)
    assert (small.train.task, small.train.seq_len) == (task, job.train.seq_len)
    own, proven = build_dataset(job.data, job.train.seq_len, job.train.task), proof_dataset(small)
    assert proven.num_training_samples == own.num_training_samples
    assert proven.may_ignore_targets
    for index in range(own.num_training_samples):
        for array, expected in zip(proven.sample(index), own.sample(index), strict=True):
            assert np.array_equal(array, expected)
        _, targets, documents, *_ = proven.sample(index)
        # Padding is the last document: others have targets that do not count, too.
        assert (targets[documents != documents.max()] == IGNORED).any()
        assert len(set(documents)) > 2


def test_ids_are_folded_into_the_small_vocabulary_and_nothing_else_changes(tmp_path: Path) -> None:
    _, small = own_job("sft", tmp_path)
    few = small.replace(model=small.model.replace(options={**small.model.options, "vocab_size": 50}))
    whole, folded = proof_dataset(small), proof_dataset(few)
    assert folded.vocab_size == 50
    for index in range(whole.num_training_samples):
        (inputs, targets, documents), (others, of_others, same) = whole.sample(index), folded.sample(index)
        assert np.array_equal(others, inputs % 50)
        assert np.array_equal(of_others, np.where(targets == IGNORED, IGNORED, targets % 50))
        assert np.array_equal(documents, same)


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_without_its_data_a_job_of_the_same_task_is_proven(task: str, tmp_path: Path) -> None:
    job, _ = own_job(task, tmp_path)
    away = job.replace(data=job.data.replace(source=str(tmp_path / "away.jsonl")))
    small = small_job(away, [Layout(cp=2)], tmp_path / "sums.jsonl", 3, "float64").job
    dataset = proof_dataset(small)
    assert small.train.task == task
    _, targets, documents, *_ = dataset.sample(0)
    assert len(set(documents)) > 3
    assert (targets == IGNORED).sum() > len(set(documents))
