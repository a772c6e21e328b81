"""Every bad document of a corpus is named, and good ones around it are read."""

import json
from pathlib import Path

import pytest

from meshwright.data.examine import source_check
from meshwright.data.examine.source_check import SourceCheck, check_source
from meshwright.spec.job.sections import DataSection

BAD = ['{"text": "cut', "[1]", '{"other": 1}', '{"text": 5}', '{"text": "\\ud800"}', "[" * 100_000]


def checked(section: DataSection) -> SourceCheck:
    found = SourceCheck()
    check_source(section, found)
    return found


def lines(*bad: str) -> str:
    return "\n".join(line for one in bad for line in (json.dumps({"text": "good"}), "", one))


def test_all_bad_lines_are_named_and_good_ones_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(*BAD))
    found = checked(DataSection(source=str(tmp_path)))
    assert (found.num_problems, found.num_documents, found.num_bytes) == (len(BAD), len(BAD), 4 * len(BAD))
    for number, problem in enumerate(found.problems, start=1):
        assert problem.where == f"{tmp_path}/a.jsonl"
        assert problem.reason.startswith(f"{tmp_path}/a.jsonl:{3 * number}")


def test_each_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    found = checked(DataSection(source=str(tmp_path)))
    reasons = {Path(one.where).name: one.reason for one in found.problems}
    assert set(reasons) == {"latin.txt", "binary.txt", "link.txt"}
    assert "byte 3 (b'\\xe9') starts no character" in reasons["latin.txt"]
    assert "is no regular file but a link" in reasons["link.txt"]
    assert (found.num_files, found.num_empty_files, found.num_documents) == (6, 2, 1)


def test_parquet_rows_and_files(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a", None, "c", None]}), tmp_path / "rows.parquet")
    parquet.write_table(arrow.table({"body": ["a"]}), tmp_path / "columns.parquet")
    (tmp_path / "noise.parquet").write_bytes(b"\0" * 100)
    found = checked(DataSection(source=str(tmp_path)))
    assert found.num_documents == 2
    words = ["columns.parquet has no field 'text'", "noise.parquet is no Parquet file", "row 2: field", "row 4: field"]
    assert [word in one.reason for word, one in zip(words, found.problems, strict=True)] == [True] * 4


def test_a_source_without_text_or_files_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "holds no text" in checked(DataSection(source=str(tmp_path))).problems[0].reason
    assert "does not exist" in checked(DataSection(source=str(tmp_path / "none"))).problems[0].reason


def test_no_more_than_max_bytes_are_read(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("text")
    (tmp_path / "d.txt").write_bytes(b"\xff")
    found = checked(DataSection(source=str(tmp_path), max_bytes=9))
    assert (found.num_files, found.num_problems) == (3, 0)
    (rest,) = found.unread
    assert (rest.source, rest.max_bytes, rest.num_files, rest.num_files_unread) == (str(tmp_path), 9, 4, 1)
    (tmp_path / "d.txt").write_text("text")
    rests = [checked(DataSection(source=str(tmp_path), max_bytes=most)).unread for most in (8, 15, 16, 17)]
    assert [[one.num_files_unread for one in rest] for rest in rests] == [[2], [0], [], []]


def test_what_is_kept_of_many_problems_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_check, "MAX_PROBLEMS", 3)
    (tmp_path / "a.jsonl").write_text("no\n" * 10)
    found = checked(DataSection(source=str(tmp_path)))
    assert (found.num_problems, len(found.problems)) == (10, 3)
