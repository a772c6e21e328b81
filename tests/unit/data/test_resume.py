import json
from typing import Any

import pytest

from meshwright.data.order import check_resumable
from meshwright.errors import DataError

POSITION: dict[str, Any] = {
    "data": {
        "source": "corpus.txt",
        "content_hash": "aa",
        "num_bytes": 100,
        "num_tokens": 101,
        "tokenizer": "bytes",
        "end_of_text": 256,
        "seq_len": 8,
        "num_training_samples": 11,
        "num_validation_samples": 1,
    },
    "seed": 0,
    "shuffle": True,
    "global_batch_size": 4,
}


def test_the_same_data_resumes_also_after_json_and_elsewhere() -> None:
    saved = json.loads(json.dumps(POSITION))
    check_resumable(saved, {**POSITION, "data": {**POSITION["data"], "source": "moved/corpus.txt"}})


@pytest.mark.parametrize(
    ("key", "value", "origin"),
    [
        ("seed", 1, "train.seed"),
        ("shuffle", False, "data.shuffle"),
        ("global_batch_size", 8, "train.global_batch_size"),
    ],
)
def test_another_order_is_refused(key: str, value: object, origin: str) -> None:
    with pytest.raises(DataError, match=f"{key} was {POSITION[key]} and is now {value} \\(set by {origin}\\)"):
        check_resumable(POSITION, {**POSITION, key: value})


def test_every_change_of_the_data_is_named() -> None:
    current = {**POSITION, "data": {**POSITION["data"], "content_hash": "bb", "seq_len": 16}}
    with pytest.raises(DataError) as caught:
        check_resumable(POSITION, current)
    assert "content_hash was aa and is now bb" in str(caught.value)
    assert "seq_len was 8 and is now 16 (set by train.seq_len)" in str(caught.value)
    assert "tokenizer" not in str(caught.value)


def test_data_of_another_kind_is_refused() -> None:
    other = {**POSITION, "data": {"class": "MyData", "options": {}, "sample_hash": "cc", "num_training_samples": 11}}
    with pytest.raises(DataError, match="class was None and is now MyData"):
        check_resumable(POSITION, other)
