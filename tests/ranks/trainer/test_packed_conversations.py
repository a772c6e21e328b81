"""The gradients of conversations are those of each alone in a row, however they are packed, batched and shared."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler_warnings import COMPILER_WARNINGS
from meshwright.data.dataset import build_dataset
from meshwright.prover.differences import Record
from meshwright.prover.record import record
from meshwright.spec.job.job import Job
from run_ranks import run_ranks
from training_runs import TINY_MODEL, tiny_job, train_on_ranks

# Of 56, 26, 25 and 23 inputs: rows of 132 hold all four, rows of 76 one and three, rows of 80 two and two.
CONVERSATIONS = [
    [("user", "Two turns?"), ("assistant", "Y."), ("user", "1?"), ("assistant", "Na.")],
    [("user", "Hi"), ("assistant", "Hello")],
    [("user", "Hm"), ("assistant", "Well")],
    [("user", "A"), ("assistant", "abc")],
]
NONE, FOUR, ONE_AND_THREE, TWO_AND_TWO = ("none", 76, 4), ("whole", 132, 1), ("whole", 76, 2), ("whole", 80, 2)
"""Packing, tokens of a row, rows of the batch."""
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 132, "vocab_size": 257}
"""A config.json: positions are learned, so that packing is exact only where they restart with each conversation."""

COMPILED = {"compile": True, "compile_loss": True, "compile_backend": "aot_eager"}


def job(folder: Path, rows: tuple[str, int, int], model: dict[str, Any] = TINY_MODEL, **layout: Any) -> dict[str, Any]:
    packing, seq_len, num_rows = rows
    file = folder / "conversations.jsonl"
    if not file.exists():
        messages = ([{"role": role, "content": text} for role, text in turns] for turns in CONVERSATIONS)
        file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages))
    data = {"source": str(file), "cache_dir": str(folder / "cache"), "packing": packing, "validation_fraction": 0.0}
    return {
        "model": model,
        "data": {**data, "mask_documents": packing == "whole"},
        "train": {"task": "sft", "steps": 1, "seq_len": seq_len, "global_batch_size": num_rows},
        "precision": {"compute": "float64"},
        "layout": {"dp_shard": 1, **layout},
        "run": {"device": "cpu"},
    }


def record_all(jobs: list[dict[str, Any]]) -> list[Record]:
    return [record(Job.from_dict(one), "cpu", None, False)[0] for one in jobs]


def gradients(records: list[Record]) -> dict[str, np.ndarray]:
    """Return whole gradients from the shards of all ranks."""
    shards = defaultdict(list)
    for one in records:
        for name, shard in one.gradients[0].items():
            shards[name].append(shard)
    found = {}
    for name, parts in shards.items():
        found[name] = np.full(parts[0].shape, np.nan)
        for part in parts:
            found[name][
                tuple(slice(at, at + size) for at, size in zip(part.offsets, part.values.shape, strict=True))
            ] = part.values
    return found


def require_equal(records: list[Record], reference: Record, case: str) -> None:
    assert records[0].losses == pytest.approx(reference.losses, rel=1e-12), case
    expected = gradients([reference])
    found = gradients(records)
    assert found.keys() == expected.keys(), case
    for name, gradient in expected.items():
        # The gradient of a bias of keys is zero but for rounding.
        atol = 1e-10 * np.abs(gradient).max() + 1e-16
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=atol, err_msg=case)


def test_rows_are_as_this_file_says(tmp_path: Path) -> None:
    for rows in (NONE, FOUR, ONE_AND_THREE, TWO_AND_TWO):
        parsed = Job.from_dict(job(tmp_path, rows))
        dataset = build_dataset(parsed.data, parsed.train.seq_len, "sft")
        assert dataset.num_training_samples == rows[2]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_packing_and_microbatches_change_no_gradient(positions: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    model = TINY_MODEL if positions == "rotary" else {"source": str(tmp_path / "config.json")}
    cases = [
        (NONE, {"microbatch_size": 4}),
        (NONE, {"microbatch_size": 2}),
        (NONE, {"microbatch_size": 1}),
        (FOUR, {}),
        (ONE_AND_THREE, {"microbatch_size": 2}),
        (ONE_AND_THREE, {"microbatch_size": 1}),
        (TWO_AND_TWO, {"microbatch_size": 2}),
        (TWO_AND_TWO, {"microbatch_size": 1, "loss_chunks": 3}),
    ]
    cases = cases if positions == "rotary" else [cases[0], *cases[3:5]]
    (records,) = run_ranks(record_all, 1, [job(tmp_path, rows, model, **layout) for rows, layout in cases])
    for case, found in zip(cases, records, strict=True):
        require_equal([found], records[0], str(case))


def test_no_layout_changes_a_gradient(tmp_path: Path) -> None:
    ((reference,),) = run_ranks(record_all, 1, [job(tmp_path, NONE, microbatch_size=4)])
    cases = [
        (ONE_AND_THREE, {"dp_shard": 2}),
        (NONE, {"dp_replicate": 2}),
        (FOUR, {"cp": 2, "cp_method": "all-gather"}),
        (TWO_AND_TWO, {"cp": 2, "cp_method": "ring"}),
        (ONE_AND_THREE, {"cp": 2, "cp_method": "ulysses"}),
        (ONE_AND_THREE, {"tp": 2}),
        (TWO_AND_TWO, {"tp": 2, "loss_chunks": 2}),
        (TWO_AND_TWO, {"pp": 2}),
        (NONE, {"pp": 2, "microbatch_size": 2}),
    ]
    by_rank = run_ranks(record_all, 2, [job(tmp_path, rows, **layout) for rows, layout in cases])
    for case, found in zip(cases, zip(*by_rank, strict=True), strict=True):
        require_equal(list(found), reference, str(case))


def sft(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job on rows of two conversations, one of four held out."""
    own = job(folder, TWO_AND_TWO)
    own["data"]["validation_fraction"] = 0.25
    own["precision"], own["layout"] = {"compute": "float32"}, {"dp_shard": -1}
    own["train"] = {"task": "sft", "seq_len": 80, "global_batch_size": 4, "steps": 4}
    return tiny_job(folder, **{name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}})


@pytest.mark.long
def test_exact_sums_give_the_same_bits_on_two_ranks(tmp_path: Path) -> None:
    exact = sft(tmp_path, train={"exact_elastic": True, "validation_interval": 2})
    one, two = (train_on_ranks(exact, tmp_path / str(ranks), ranks) for ranks in (1, 2))
    assert one.parameter_hash == two.parameter_hash
    assert one.losses == two.losses
    assert one.validation == two.validation


def test_validation_is_the_mean_over_the_targets_of_held_out_conversations(tmp_path: Path) -> None:
    still = {"optimizer": {"learning_rate": 1e-30}, "layout": {"microbatch_size": 1}}
    found = []
    for ranks, rows, data in ((1, 1, {"packing": "none", "mask_documents": False}), (2, 4, {})):
        train = {"validation_interval": 4, "global_batch_size": rows}
        changes = {"train": train, "data": {**data, "validation_fraction": 0.5}}
        finished = train_on_ranks(sft(tmp_path, **still, **changes), tmp_path / str(ranks), ranks)
        found.append([row["validation_loss"] for row in finished.validation])
    # Two conversations in two batches of one, or in one row of a batch of four.
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.long
def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, stopped = sft(tmp_path), sft(tmp_path, train={"stop_after": 2})
    finished = train_on_ranks(whole, tmp_path / "whole", 2)
    assert set(train_on_ranks(stopped, tmp_path / "stopped", 2).codes) == {75}
    resumed = train_on_ranks(whole, tmp_path / "stopped", 2, resume=True)
    assert resumed.parameter_hash == finished.parameter_hash
    # The template goes with the run.
    assert "generation" in (resumed.run.folder / "chat_template.jinja").read_text()


@pytest.mark.long
@COMPILER_WARNINGS
def test_compiled_blocks_take_positions_of_each_row(tmp_path: Path) -> None:
    plain, compiled = sft(tmp_path), sft(tmp_path, layout=COMPILED)
    one = train_on_ranks(plain, tmp_path / "plain", 1)
    train_on_ranks(compiled, tmp_path / "compiled", 1).require_close(one)
