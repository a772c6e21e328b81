"""Tokens of Megatron's indexed files and of MDS folders are read where they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.formats.mds import MdsTokens
from meshwright.data.formats.stored_tokens import token_files
from meshwright.data.order import check_resumable
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection
from written_corpora import MEGATRON_CODES, write_mds, write_megatron

DOCUMENTS = [[*range(number % 7, number % 7 + 20), 256] for number in range(40)]
SMALL = [[value % 128 for value in document] for document in DOCUMENTS]


def section(folder: Path, source: Path, **options: Any) -> DataSection:
    return DataSection(source=str(source), cache_dir=str(folder / "cache"), validation_fraction=0.0, **options)


def stream_of(data: DataSection, seq_len: int = 10) -> list[int]:
    dataset = build_dataset(data, seq_len)
    return [token for index in range(dataset.num_training_samples) for token in dataset.sample(index)[0].tolist()]


@pytest.mark.parametrize("dtype", MEGATRON_CODES)
def test_megatron_tokens_of_every_type_are_the_stream(tmp_path: Path, dtype: str) -> None:
    documents = SMALL if dtype in ("u1", "i1") else DOCUMENTS
    prefix = write_megatron(tmp_path / "web_text_document", documents, dtype)
    joined = [token for document in documents for token in document]
    for name in ("web_text_document", "web_text_document.bin", "web_text_document.idx"):
        assert stream_of(section(tmp_path, tmp_path / name)) == joined[: (len(joined) - 1) // 10 * 10]
    fingerprint = build_dataset(section(tmp_path, prefix), 10).fingerprint
    assert (fingerprint["num_tokens"], fingerprint["num_documents"]) == (len(joined), 40)


def test_max_bytes_counts_stored_bytes(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", DOCUMENTS, "i8")
    fingerprint = build_dataset(section(tmp_path, prefix, max_bytes=8 * 100 + 7), 10).fingerprint
    assert (fingerprint["num_tokens"], fingerprint["num_documents"], fingerprint["num_bytes"]) == (100, 5, 800)


@pytest.mark.parametrize(
    ("name", "cut", "match"),
    [
        ("a.bin", 8, r"a.bin has 3352 bytes but a.idx lists 840 tokens of 4: one of them is truncated"),
        ("a.idx", 8, r"a.idx is no index of Megatron's format, or truncated"),
        ("a.idx", 500, r"a.idx is no index of Megatron's format, or truncated"),
    ],
)
def test_truncated_megatron_files_are_named(tmp_path: Path, name: str, cut: int, match: str) -> None:
    prefix = write_megatron(tmp_path / "a", DOCUMENTS)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-cut])
    with pytest.raises(DataError, match=match) as caught:
        build_dataset(section(tmp_path, prefix), 10)
    assert problems(section(tmp_path, prefix), 10, None) == [str(caught.value)]


def test_one_of_megatrons_files_alone_is_no_source(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.idx").unlink()
    with pytest.raises(DataError, match=r"a.idx is missing"):
        build_dataset(section(tmp_path, tmp_path / "a.bin"), 10)


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", [*DOCUMENTS, [50256]])
    for data, match in (
        (section(tmp_path, prefix), r"holds token 50256, but data.tokenizer = 'bytes' has 257 tokens"),
        (section(tmp_path, prefix, deduplicate=True), r"data.deduplicate = true compares documents of text"),
    ):
        with pytest.raises(DataError, match=match) as caught:
            build_dataset(data, 10)
        assert problems(data, 10, None) == [str(caught.value)]
    negative = write_megatron(tmp_path / "b", [[1, 2, -3], *DOCUMENTS])
    with pytest.raises(DataError, match="token 2 is -3, no id"):
        build_dataset(section(tmp_path, negative), 10)


def test_documents_are_masked_only_where_they_end(tmp_path: Path) -> None:
    ended = write_megatron(tmp_path / "a", DOCUMENTS)
    assert build_dataset(section(tmp_path, ended, mask_documents=True), 10).end_of_document == 256
    data = section(tmp_path, write_megatron(tmp_path / "b", SMALL), mask_documents=True)
    with pytest.raises(DataError, match=r"data.mask_documents = true separates documents at token 256, .*--append-eod"):
        build_dataset(data, 10)


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:uint16", "ndarray:int32:21", "bytes"])
def test_mds_tokens_are_the_stream(tmp_path: Path, encoding: str) -> None:
    dtype = {"ndarray": "int32", "bytes": "int64"}.get(encoding) or encoding.split(":")[1]
    rows = [{"tokens": np.array(one, dtype), "id": "x" * (n % 3)} for n, one in enumerate(DOCUMENTS)]
    folder = write_mds(tmp_path / "mds", {"tokens": encoding, "id": "str"}, [rows[:7], rows[7:8], rows[8:]])
    joined = [token for document in DOCUMENTS for token in document]
    data = section(tmp_path, folder, text_key="tokens")
    assert stream_of(data) == joined[: (len(joined) - 1) // 10 * 10]
    assert build_dataset(data, 10).fingerprint["num_documents"] == 40
    assert problems(data, 10, None) == []


@given(lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4), data=st.data())
def test_any_range_of_mds_tokens_is_that_of_the_stream(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], data: st.DataObject
) -> None:
    total = sum(map(sum, lengths))
    stream = np.arange(total, dtype="int64")
    ends = iter(np.cumsum([length for shard in lengths for length in shard]))
    shards = [[{"t": stream[(end := int(next(ends))) - length : end]} for length in shard] for shard in lengths]
    folder = write_mds(tmp_path_factory.mktemp("mds") / "a", {"t": "ndarray:int64"}, shards)
    tokens = MdsTokens(sorted(folder.glob("*.mds")), "t")
    start, stop = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    assert tokens[start:stop].tolist() == stream[start:stop].tolist()
    assert len(tokens) == total


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    rows = [{"t": np.array(one, "int32")} for one in DOCUMENTS]
    folder = write_mds(tmp_path / "mds", {"t": "ndarray:int32"}, [rows])
    shard = folder / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"shard.00000.mds is truncated: it has \d+ bytes of \d+"):
        build_dataset(section(tmp_path, folder, text_key="t"), 10)


def test_tokens_that_change_between_runs_are_refused(tmp_path: Path) -> None:
    data = section(tmp_path, write_megatron(tmp_path / "a", DOCUMENTS))
    saved = json.loads(json.dumps({"data": build_dataset(data, 10).fingerprint}))
    check_resumable(saved, {"data": build_dataset(data, 10).fingerprint})
    write_megatron(tmp_path / "a", [*DOCUMENTS[:-1], [7] * 21])
    with pytest.raises(DataError, match=r"content_hash was .* and is now"):
        check_resumable(saved, {"data": build_dataset(data, 10).fingerprint})
    write_megatron(tmp_path / "a", DOCUMENTS[:-1])
    with pytest.raises(DataError, match="num_tokens was 840 and is now 819"):
        check_resumable(saved, {"data": build_dataset(data, 10).fingerprint})


@pytest.mark.parametrize("name", ["a", "a.bin", "a.idx"])
@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_the_missing_one_of_megatrons_two_files_is_named(tmp_path: Path, name: str, missing: str) -> None:
    write_megatron(tmp_path / "a", [[1, 2, 3]])
    (tmp_path / f"a.{missing}").unlink()
    with pytest.raises(DataError, match=rf"two files, PREFIX.bin and PREFIX.idx, and .*a.{missing} is missing"):
        token_files(DataSection(source=str(tmp_path / name)))
