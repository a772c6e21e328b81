"""What is left out of a folder is said, and so is why a file, a pattern or a list of files cannot be read."""

from __future__ import annotations

import bz2
import json
import re
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.encoding import Encoding
from meshwright.spec.job.sections import DataSection

_TEXT = "word " * 200


def folder_of(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(_TEXT)
    return folder


def section_of(source: object, tmp_path: Path) -> DataSection:
    return DataSection(source=str(source), cache_dir=str(tmp_path / "cache"))


def note_of(source: Path, task: Any = "pretrain") -> str | None:
    section = DataSection(source=str(source))
    return Encoding(section, task).reader.unread_files_note(section)


def test_files_of_other_kinds_are_counted_by_suffix(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a.txt", "b.json", "c.JSON", "d.jsonl.bz2", "e", "f.log", "g.gz")
    note = note_of(folder)
    assert note is not None
    kinds = ".json (2), .gz (1), .jsonl.bz2 (1), .log (1), no suffix (1)"
    assert f"6 files in it are not read, of other kinds: {kinds}, such as {folder / 'b.json'}: convert" in note


def test_hidden_files_and_companions_are_not_named(tmp_path: Path) -> None:
    names = ("README", "LICENSE", ".hidden.json", "a.idx", "b.index", "dataset_info.json", "_SUCCESS")
    assert note_of(folder_of(tmp_path, "a.txt", "b.md", *names)) is None
    assert note_of(tmp_path / "texts" / "a.txt") is None


def test_text_next_to_conversations_is_of_another_kind(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a.txt", "README.md")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "b.jsonl").write_text(json.dumps({"messages": turns}))
    note = note_of(folder, "sft")
    assert note is not None
    assert "1 file in it is not read, of other kinds: .txt (1), such as" in note


def test_training_and_every_command_say_so(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "a.txt", "b.json")
    said = "1 file in it is not read, of other kinds: .json (1)"
    assert said in " ".join(build_dataset(section_of(source, tmp_path), 16).left_out)
    job = tmp_path / "job.toml"
    job.write_text(f'[data]\nsource = "{source}"\ncache_dir = "{tmp_path / "cache"}"\n[model]\nsource = "llama-1m"\n')
    assert said in mw.datasets.verify(job).unread_files[0]
    assert said in mw.datasets.prepare(job).sources[0].left_out[0]
    assert said in f"{mw.check(job)}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.jsonl.bz2", r"is compressed, and .bz2 is not read, only .gz and .zst: decompress it"),
        ("*.txt", r"does not exist: patterns and lists of files are not read: name the folder.*data.mixture"),
        ("b.txt,c.txt", r"does not exist: patterns and lists of files are not read: name the folder.*data.mixture"),
    ],
)
def test_what_is_no_source_says_why(tmp_path: Path, name: str, words: str) -> None:
    folder = folder_of(tmp_path, "b.txt", "c.txt")
    (folder / "a.jsonl.bz2").write_bytes(bz2.compress(b"{}"))
    for source in (str(folder / name), f"file://{folder / name}"):
        (problem,) = problems(section_of(source, tmp_path), 16, None)
        assert re.search(words, problem), problem
