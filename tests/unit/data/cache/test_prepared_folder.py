"""A prepared folder stands for its text: same samples, same identity, no tokenizers library."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from full_disk import no_file_larger_than
from meshwright.data.cache.prepared_folder import MANIFEST, find_prepared, require_absent, write_prepared
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.order import check_resumable
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from meshwright.errors import ConfigError, DataError
from meshwright.spec.job.sections import DataSection

SEQ_LEN = 16


@pytest.fixture
def section(tmp_path: Path) -> DataSection:
    (tmp_path / "corpus.txt").write_text("some words of a text\n" * 50)
    return DataSection(source=str(tmp_path / "corpus.txt"), cache_dir=str(tmp_path / "cache"))


def prepared(section: DataSection, folder: Path, tokenizer: Tokenizer | None = None) -> DataSection:
    tokenizer = tokenizer or ByteTokenizer()
    write_prepared(folder, TokenCache(section, tokenizer), tokenizer)
    own = "bytes" if isinstance(tokenizer, ByteTokenizer) else str(folder)
    return section.replace(source=str(folder), tokenizer=own)


def written_tokenizer(folder: Path) -> str:
    """Return the path of a tokenizer.json whose end of text is named in a file next to it."""
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(ByteTokenizer().to_tokenizer_json())
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    return str(folder / "tokenizer")


def test_samples_and_identity_are_those_of_the_text(section: DataSection, tmp_path: Path) -> None:
    text, stored = build_dataset(section, SEQ_LEN), build_dataset(prepared(section, tmp_path / "out"), SEQ_LEN)
    for index in range(text.num_training_samples):
        for mine, other in zip(text.sample(index), stored.sample(index), strict=True):
            assert mine.tolist() == other.tolist()
    # A run continues with the other one.
    check_resumable({"data": text.fingerprint}, {"data": stored.fingerprint})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MANIFEST, "tokens.bin"]


def test_neither_text_nor_the_tokenizers_library_is_needed(
    section: DataSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = load_tokenizer(written_tokenizer(tmp_path))
    text = build_dataset(section.replace(tokenizer=str(tmp_path / "tokenizer")), SEQ_LEN)
    stored = prepared(section, tmp_path / "out", tokenizer)
    Path(section.source).unlink()
    assert load_tokenizer(stored.tokenizer).end_of_text == tokenizer.end_of_text == ord("a")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    dataset = build_dataset(stored.replace(mask_documents=True), SEQ_LEN)
    assert dataset.fingerprint == {**text.fingerprint, "source": stored.source}
    assert (dataset.vocab_size, dataset.end_of_document) == (257, ord("a"))
    assert problems(stored, SEQ_LEN, 257) == []


def test_other_keys_must_fit(section: DataSection, tmp_path: Path) -> None:
    stored = prepared(section, tmp_path / "out")
    other = stored.replace(tokenizer=written_tokenizer(tmp_path))
    for job, words in (
        (other, "set data.tokenizer to 'bytes'"),
        (stored.replace(max_bytes=100), "set data.max_bytes to 1050 or more"),
    ):
        with pytest.raises(DataError, match=words):
            build_dataset(job, SEQ_LEN)
        (problem,) = problems(job, SEQ_LEN, 300)
        assert words in problem
    assert "vocab_size to 257" in problems(stored, SEQ_LEN, 100)[0]
    assert "set train.seq_len to" in problems(stored, 2000, 300)[0]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap"])
def test_damaged_tokens_are_refused(section: DataSection, tmp_path: Path, damage: str) -> None:
    stored = prepared(section, tmp_path / "out")
    path = tmp_path / "out" / "tokens.bin"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes({"flip": data, "truncate": data[:-2]}.get(damage, b""))
    if damage == "remove":
        path.unlink()
    elif damage == "swap":
        Path(section.source).write_text("another text of words\n" * 50)
        prepared(section, tmp_path / "other")
        path.write_bytes((tmp_path / "other" / "tokens.bin").read_bytes())
    with pytest.raises(DataError, match="is missing, or not what `meshwright data prepare --out` wrote"):
        build_dataset(stored, SEQ_LEN)


@pytest.mark.parametrize("change", [{"format": 2}, {"tokenizer": {}}, {"content": None}, None])
def test_a_damaged_manifest_is_refused(section: DataSection, tmp_path: Path, change: dict[str, Any] | None) -> None:
    stored = prepared(section, tmp_path / "out")
    manifest = tmp_path / "out" / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text[:50] if change is None else json.dumps(json.loads(text) | change))
    with pytest.raises(DataError, match="prepare"):
        find_prepared(stored)
    assert len(problems(stored, SEQ_LEN, 300)) == 1


def test_a_full_disk_leaves_no_folder(section: DataSection, tmp_path: Path) -> None:
    cache = TokenCache(section, ByteTokenizer())
    cache.tokens()
    with no_file_larger_than(5000), pytest.raises(DataError, match=r"--out .* cannot be written .*free some space"):
        write_prepared(tmp_path / "out", cache, ByteTokenizer())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "corpus.txt"]


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        require_absent(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        require_absent(tmp_path / "none" / "out")
    require_absent(tmp_path / "new")
