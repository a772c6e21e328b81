"""Documents that cannot be read end the run or are left out, counted; copies are left out over all sources."""

import gzip
import json
import os
import socket
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.cache.content import content_of
from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.examine.source_check import SourceCheck, check_source
from meshwright.data.filtering import kept_documents
from meshwright.data.filtering.document_hashes import DocumentHashes, document_hash
from meshwright.data.formats import readers
from meshwright.data.sources import pieces
from meshwright.errors import DataError
from meshwright.spec.job.mixture_source import MixtureSource
from meshwright.spec.job.sections import DataSection


def texts(section: DataSection) -> list[str]:
    joined = [(piece.utf8, piece.ends_document) for piece in pieces(section)]
    parts = b"".join(utf8 + b"\0" * ends for utf8, ends in joined)
    return parts.decode().split("\0")[:-1]


def bad_folder(folder: Path) -> Path:
    """Write one file of each format, of which some documents cannot be read."""
    folder.mkdir()
    (folder / "1.txt").write_bytes(b"good text")
    (folder / "2.txt").write_bytes(b"bad \xff text")
    (folder / "3.txt").write_bytes(b"")
    lines = [
        '{"text": "one"}',
        "{broken",
        '["list"]',
        '{"body": "x"}',
        '{"text": 5}',
        '{"text": ""}',
        '{"text": "\\ud800"}',
    ]
    (folder / "4.jsonl").write_text("\n".join([*lines, '{"text": "two"}']))
    pq.write_table(pa.table({"text": ["three", None, "four"]}), folder / "5.parquet")
    pq.write_table(pa.table({"body": ["x"]}), folder / "6.parquet")
    (folder / "7.parquet").write_bytes(b"no parquet")
    (folder / "8.jsonl.gz").write_bytes(gzip.compress(b'{"text": "five"}\n' * 3)[:-9])
    return folder


def test_bad_documents_are_left_out_counted_and_named(tmp_path: Path) -> None:
    section = DataSection(
        source=str(bad_folder(tmp_path / "in")), on_bad_document="skip", cache_dir=str(tmp_path / "cache")
    )
    assert [text for text in texts(section) if text != "five"] == ["good text", "one", "two", "three", "four"]
    left_out = content_of(section).left_out
    assert (left_out.num_broken, left_out.num_empty, left_out.num_copies) == (10, 2, 0)
    assert [message.split(" ")[0].rpartition("/")[2] for message in left_out.first_broken] == [
        "2.txt", "4.jsonl:2", "4.jsonl:3", "4.jsonl:4", "4.jsonl:5:",
    ]  # fmt: skip
    dataset = build_dataset(section.replace(validation_fraction=0.0), 4)
    assert dataset.left_out[0] == "left out 10 documents that cannot be read, the first 5 of them:"
    # Known from the cache as well.
    assert build_dataset(section.replace(validation_fraction=0.0), 4).left_out == dataset.left_out
    assert problems(section, 4, None) == []


@pytest.mark.parametrize("name", ["2.txt", "4.jsonl", "5.parquet", "6.parquet", "7.parquet", "8.jsonl.gz"])
def test_each_of_them_ends_the_run_otherwise(tmp_path: Path, name: str) -> None:
    section = DataSection(source=str(bad_folder(tmp_path / "in") / name), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=name) as caught:
        build_dataset(section, 4)
    assert problems(section, 4, None) == [str(caught.value)]


def test_a_long_text_is_left_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_PIECE_BYTES", 8)
    monkeypatch.setattr(kept_documents, "_MEMORY_BYTES", 16)
    (tmp_path / "1.txt").write_bytes(b"good\n" * 20)
    (tmp_path / "2.txt").write_bytes(b"bad\n" * 20 + b"\xff")
    (tmp_path / "3.txt").write_bytes(b"good\n" * 20)
    (tmp_path / "4.txt").write_bytes(b"end\n")
    section = DataSection(source=str(tmp_path), on_bad_document="skip")
    assert texts(section) == ["good\n" * 20, "good\n" * 20, "end\n"]
    assert texts(section.replace(deduplicate=True)) == ["good\n" * 20, "end\n"]


def test_copies_are_left_out_over_the_sources_of_a_mixture(tmp_path: Path) -> None:
    for name, words in {"a": "x y x z", "b": "y w w", "c": "z w v q"}.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": word * 9}) + "\n" for word in words.split())
        )
    tables = tuple(MixtureSource(source=str(tmp_path / f"{name}.jsonl")) for name in "abc")
    section = DataSection(mixture=tables, deduplicate=True, validation_fraction=0.0, cache_dir=str(tmp_path / "cache"))
    expected = {"a": "xyz", "b": "w", "c": "vq"}
    for _ in range(2):
        dataset = build_dataset(section, 4)
        for table, words in zip(dataset.fingerprint["mixture"], expected.values(), strict=True):
            assert table["num_documents"] == len(words)
        assert list(dataset.left_out) == [
            "a: left out 1 document equal to an earlier one",
            "b: left out 2 documents equal to an earlier one",
            "c: left out 2 documents equal to an earlier one",
        ]
        # The second time the hashes of earlier sources are gone from the cache, and read again from the sources.
        for file in (tmp_path / "cache" / "contents").iterdir():
            file.unlink()


def test_what_a_later_source_keeps_follows_from_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first document")
    (tmp_path / "b.jsonl").write_text('{"text": "second document"}\n{"text": "third document"}\n')
    tables = tuple(MixtureSource(source=str(tmp_path / name)) for name in ("a.txt", "b.jsonl"))
    section = DataSection(mixture=tables, deduplicate=True, validation_fraction=0.0, cache_dir=str(tmp_path / "cache"))
    assert build_dataset(section, 4).fingerprint["mixture"][1]["num_documents"] == 2
    (tmp_path / "a.txt").write_text("second document")
    assert build_dataset(section, 4).fingerprint["mixture"][1]["num_documents"] == 1


@pytest.mark.usefixtures("_few_recent")
@given(numbers=st.lists(st.integers(0, 300)), more=st.lists(st.integers(0, 600)))
def test_hashes_are_a_set(numbers: list[int], more: list[int]) -> None:
    seen, known = DocumentHashes(), set()
    for number in numbers:
        assert seen.add(document_hash([b"%d" % number])) == (number not in known)
        known.add(number)
    fresh = sorted(set(more) - known)
    seen.update(b"".join(document_hash([b"%d" % number]) for number in fresh))
    for number in range(600):
        assert seen.add(document_hash([b"%d" % number])) == (number not in known and number not in fresh)
    assert len(seen) == 600 + len({n for n in fresh if n >= 600})


@pytest.fixture(scope="module")
def _few_recent() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.data.filtering.document_hashes._LEAST_RECENT", 7)
        yield


def test_hashes_take_about_22_bytes_each() -> None:
    seen = DocumentHashes()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(60_000):
        seen.add(number.to_bytes(8) * 2)
    seen.update(b"")
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert size < 22 * 60_000


def irregular_folder(folder: Path) -> Path:
    """Write a text next to what is no file, though its name says so: opening the pipe would wait for ever."""
    folder.mkdir()
    (folder / "1.txt").write_text("good text")
    (folder / "2.txt").symlink_to("1.txt")
    (folder / "3.txt").symlink_to("gone.txt")
    (folder / "4.jsonl").symlink_to("4.jsonl")
    os.mkfifo(folder / "5.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "6.txt"))
    (folder / "7.txt").symlink_to("/dev/zero")
    return folder


def test_what_is_no_regular_file_is_named_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    section = DataSection(source=str(irregular_folder(Path("in"))), cache_dir="cache")
    with pytest.raises(DataError, match=r"in/3.txt is no regular file but a link to gone.txt \(No such file"):
        content_of(section)
    found = SourceCheck()
    check_source(section, found)
    reasons = [one.reason.partition("but a ")[2].partition(":")[0] for one in found.problems]
    assert (reasons[2:], found.num_documents) == (["named pipe", "socket", "device"], 2)
    assert problems(section, 8, 300)[0].startswith("in/3.txt is no regular file")
    skipping = section.replace(on_bad_document="skip")
    assert texts(skipping) == 2 * ["good text"]
    assert content_of(skipping).left_out.num_broken == 5
    assert not problems(skipping, 8, 300)
    assert problems(section.replace(source="in/4.jsonl"), 8, 300) == [
        "data.source = 'in/4.jsonl' is a link to 4.jsonl, which leads to no file: set it to one, or to a folder"
    ]
