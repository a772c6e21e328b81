import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.cache.content import measure
from meshwright.data.formats import readers
from meshwright.data.formats.readers import Piece
from meshwright.data.sources import first_bytes, list_files, pieces
from meshwright.errors import DataError, UnsupportedError
from meshwright.spec.job.sections import DataSection
from meshwright.spec.job.user_object import is_object_source


def documents(source: Path | str, **options: Any) -> list[str]:
    found, open_document = [], b""
    for piece in pieces(DataSection(source=str(source), **options)):
        open_document += piece.utf8
        if piece.ends_document:
            found.append(open_document.decode())
            open_document = b""
    assert not open_document, "the last document has no end"
    return found


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_stdlib_is_the_library_without_tests_and_packages() -> None:
    section = DataSection()
    folder = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(folder).as_posix() for path in list_files(section)]
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert [name.split("/") for name in names] == sorted(name.split("/") for name in names)
    content = measure(pieces(section))
    assert 5_000_000 < content.num_bytes <= 16_000_000
    assert content == measure(pieces(section))


def test_stdlib_starts_with_its_first_file() -> None:
    first = next(path for path in list_files(DataSection()) if path.stat().st_size)
    assert documents("stdlib", max_bytes=50) == [first.read_bytes()[:50].decode()]


def test_a_python_without_its_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"keeps no \*\.py .* set data.source to"):
        documents("stdlib")


def test_a_text_file_is_one_document_whatever_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "corpus.log"
    path.write_bytes("one\r\ntwo — drei\n".encode())
    assert documents(path) == ["one\r\ntwo — drei\n"]


def test_jsonl_records_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"body": "a"}\n\n{"body": "", "n": 1}\n{"n": 2, "body": "b\\u00e9"}')
    assert documents(path, text_key="body") == ["a", "bé"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    texts = [f"row {i}" for i in range(3000)]
    pq.write_table(pa.table({"n": list(range(3000)), "text": texts}), path)
    assert documents(path) == texts


def test_a_folder_is_read_sorted_with_its_subfolders(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "b" / "z.md").write_text("third")
    (tmp_path / "c.py").write_text("fourth")
    (tmp_path / "a.TXT").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.png").write_bytes(b"\xff\x00")
    write_jsonl(tmp_path / "b" / "a.jsonl", {"text": "second"})
    assert documents(tmp_path) == ["first", "second", "third", "fourth"]


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    corpus.mkdir()
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text("linked")
    (corpus / "link").symlink_to(elsewhere)
    (elsewhere / "loop").symlink_to(corpus)
    assert documents(corpus) == ["linked"]


@given(texts=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6), max_bytes=st.integers(1, 80))
def test_max_bytes_takes_each_whole_character_within_it(texts: list[str], max_bytes: int) -> None:
    encoded = [text.encode() for text in texts]
    stream = [Piece(utf8, ends_document=index % 2 == 1) for index, utf8 in enumerate(encoded)]
    stream[-1] = Piece(encoded[-1], ends_document=True)
    taken = list(first_bytes(stream, DataSection(max_bytes=max_bytes)))
    whole, joined = b"".join(encoded), b"".join(piece.utf8 for piece in taken)
    assert whole.startswith(joined)
    assert len(joined) <= max_bytes
    assert joined == whole[:max_bytes].decode(errors="ignore").encode()
    assert all(piece.utf8 for piece in taken)
    assert not taken or taken[-1].ends_document


def test_max_bytes_reaches_over_files_and_ends_inside_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    (tmp_path / "b.txt").write_text("abcdéf")
    (tmp_path / "c.txt").write_bytes(b"\xff never read")
    assert documents(tmp_path, max_bytes=10) == ["0123456789"]
    assert documents(tmp_path, max_bytes=12) == ["0123456789", "ab"]
    assert documents(tmp_path, max_bytes=15) == ["0123456789", "abcd"]
    assert documents(tmp_path, max_bytes=16) == ["0123456789", "abcdé"]


@pytest.mark.parametrize("text", ["line of text\n" * 40, "é" * 200, "a" * 301, "x\n" + "€" * 150])
def test_a_long_document_comes_in_pieces_that_join_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(readers, "_PIECE_BYTES", 32)
    path = tmp_path / "long.txt"
    path.write_text(text)
    found = list(pieces(DataSection(source=str(path))))
    assert len(found) > 5
    assert "".join(piece.text for piece in found) == text
    assert [piece.ends_document for piece in found] == [False] * (len(found) - 1) + [True]
    if "line" in text:
        assert all(piece.text.endswith("\n") for piece in found)


def test_the_hash_knows_content_and_borders_but_no_names(tmp_path: Path) -> None:
    def content_hash(source: Path) -> str:
        return measure(pieces(DataSection(source=str(source)))).content_hash

    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "a.txt").write_text("one")
    (tmp_path / "ab" / "b.txt").write_text("two")
    joined = tmp_path / "joined.txt"
    joined.write_text("onetwo")
    records = write_jsonl(tmp_path / "records.jsonl", {"text": "one"}, {"text": "two"})
    assert content_hash(tmp_path / "ab") == content_hash(records)
    assert content_hash(records) != content_hash(joined)


def test_missing_source_names_what_was_probably_meant(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(DataError, match=r"corpsu.txt' does not exist .*did you mean .*corpus.txt'.*set it to stdlib"):
        documents(tmp_path / "corpsu.txt")
    with pytest.raises(DataError, match="does not exist"):
        documents(tmp_path / "no" / "such" / "folder.txt")


def test_unreadable_file_is_named() -> None:
    # Reading this file fails also for root, whom permissions do not stop.
    source = "/proc/self/mem"
    if not os.path.exists(source):
        pytest.skip("needs Linux's /proc")
    with pytest.raises(DataError, match=r"/proc/self/mem cannot be read \(Input/output error\).*data.source"):
        documents(source)


@pytest.mark.parametrize("name", ["file", "folder"])
def test_forbidden_sources_are_named(tmp_path: Path, name: str) -> None:
    if os.geteuid() == 0:
        pytest.skip("permissions do not stop root")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    forbidden = folder if name == "folder" else folder / "a.txt"
    forbidden.chmod(0)
    try:
        with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
            documents(folder)
    finally:
        forbidden.chmod(0o700)


def test_empty_corpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(DataError, match=r"empty.txt' holds no text in 1 file"):
        documents(path)
    path.write_text("é")
    with pytest.raises(DataError, match=r"holds no text in 1 file.* the first 1 bytes"):
        documents(path, max_bytes=1)


def test_folder_without_text_lists_the_suffixes(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"is a folder without text: .*\.jsonl .*\.parquet .*\.txt"):
        documents(tmp_path)


def test_undecodable_bytes_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 ole")
    with pytest.raises(DataError, match=r"latin.txt is no UTF-8 text: byte 3 \(b'\\xe9'\)"):
        documents(path)
    path.write_bytes(b"fine\n" * 20 + b"\xe9")
    monkeypatch.setattr(readers, "_PIECE_BYTES", 16)
    with pytest.raises(DataError, match="byte 100"):
        documents(path)
    path.write_bytes(b"\x80" * 40)
    with pytest.raises(DataError, match="byte 0"):
        documents(path)


def test_jsonl_mistakes_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    for line, message in (
        ('{"text": "b"', r"bad.jsonl:2 is no JSON \("),
        ('["b"]', "bad.jsonl:2 is a JSON array, not an object"),
        ("null", "bad.jsonl:2 is a JSON null, not an object"),
        ('{"body": "b", "id": 1}', r"bad.jsonl:2 has no field 'text' \(its fields: 'body', 'id'\).*data.text_key"),
        ("{}", r"bad.jsonl:2 has no field 'text' \(its fields: none\)"),
        ('{"text": null}', "bad.jsonl:2: field 'text' is null, not text"),
        ('{"text": "\\ud83d"}', r"bad.jsonl:2: field 'text' holds half of a surrogate pair \('\\ud83d'\)"),
    ):
        path.write_text(f'{{"text": "a"}}\n{line}\n')
        with pytest.raises(DataError, match=message):
            documents(path)
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2 is no UTF-8 text \(byte b'\\xe9'\): convert the file to UTF-8"):
        documents(path)
    path.write_bytes('{"text": "a"}\n'.encode("utf-16"))
    with pytest.raises(DataError, match=r"bad.jsonl:1 is no UTF-8 text \(byte b'\\xff'\)"):
        documents(path)
    path.write_text(f'{{"text": {"1" * 5000}}}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:1 is no JSON \([^;]*\): each line"):
        documents(path)


def test_parquet_mistakes_name_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"text": ["a", None]}), path)
    with pytest.raises(DataError, match=r"bad.parquet, row 2: field 'text' is null, not text"):
        documents(path)
    with pytest.raises(DataError, match=r"bad.parquet has no field 'body' \(its fields: 'text'\)"):
        documents(path, text_key="body")
    path.write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match=r"bad.parquet is no Parquet file"):
        documents(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "corpus.parquet"
    path.write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[parquet\]'"):
        documents(path)


def test_a_json_file_is_not_taken_for_text(tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    path.write_text("[]")
    with pytest.raises(DataError, match=r"one JSON object a line and name the file corpus.jsonl"):
        documents(path)


def test_user_objects_are_told_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_object_source("my_module:MyData")
    assert is_object_source("my.package.module:make_data")
    assert not is_object_source("folder/file.txt")
    assert not is_object_source("C:/file.txt")
    assert not is_object_source("stdlib")
    (tmp_path / "odd:name").write_text("text")
    assert not is_object_source("odd:name")
