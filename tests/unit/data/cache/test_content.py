"""A corpus is measured once: the record in the cache holds as long as its files are the same."""

import os
from pathlib import Path

import pytest

import meshwright.data.cache.content
from meshwright.data.cache.content import content_of, measure
from meshwright.data.sources import pieces
from meshwright.spec.job.sections import DataSection


@pytest.fixture
def section(tmp_path: Path) -> DataSection:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("some text")
    return DataSection(source=str(tmp_path / "corpus"), cache_dir=str(tmp_path / "cache"))


def test_an_unchanged_corpus_is_not_read_again(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    first = content_of(section)
    assert first == measure(pieces(section))
    monkeypatch.setattr(meshwright.data.cache.content, "measure", lambda *_: pytest.fail("read again"))
    assert content_of(section) == first


@pytest.mark.parametrize("change", ["text", "file", "limit"])
def test_a_change_is_measured(section: DataSection, change: str) -> None:
    before = content_of(section)
    file = Path(section.source) / "a.txt"
    if change == "text":
        file.write_text("same size")
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    elif change == "file":
        (Path(section.source) / "b.txt").write_text("more")
    else:
        section = section.replace(max_bytes=4)
    assert content_of(section) == measure(pieces(section)) != before


def test_a_cache_that_cannot_be_written_is_no_error(section: DataSection, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert content_of(section) == measure(pieces(section))
    damaged = section.replace(cache_dir=str(tmp_path / "other"))
    content_of(damaged)
    for record in (tmp_path / "other" / "contents").glob("*.json"):
        record.write_text("{")
    assert content_of(damaged) == measure(pieces(section))
