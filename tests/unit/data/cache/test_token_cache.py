import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from full_disk import no_file_larger_than
from meshwright.data.cache import encode
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.formats import readers
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

MADE = "tokenising"


class WideTokenizer(ByteTokenizer):
    """Bytes whose ids need 32 bits."""

    vocab_size = 70_000
    identity = "wide"

    def encode_batch(self, texts: Any) -> Any:
        return [ids.astype(np.uint32) + 65_536 for ids in super().encode_batch(texts)]


def make_corpus(folder: Path, *texts: str, **options: Any) -> DataSection:
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number, text in enumerate(texts):
        (corpus / f"{number}.txt").write_text(text)
    return DataSection(**{"source": str(corpus), "cache_dir": str(folder / "cache"), **options})


def files(section: DataSection) -> list[Path]:
    """Return the token files; sizes and hashes of corpora are in a folder of their own."""
    return sorted(path for path in Path(section.cache_dir).iterdir() if path.is_file())


def tokens_of(section: DataSection, tokenizer: Tokenizer | None = None) -> list[int]:
    tokens = TokenCache(section, tokenizer or ByteTokenizer()).tokens()
    return [int(token) for token in tokens]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="meshwright")


def test_documents_are_joined_by_end_of_text(tmp_path: Path) -> None:
    section = make_corpus(tmp_path, "ab", "é")
    cache = TokenCache(section, ByteTokenizer())
    tokens, content = cache.tokens(), cache.content
    assert tokens.tolist() == [97, 98, 256, 0xC3, 0xA9, 256]
    assert tokens.dtype == np.uint16
    assert not tokens.flags.writeable
    assert (content.num_bytes, content.num_documents) == (4, 2)


def test_large_vocabularies_are_kept_whole(tmp_path: Path) -> None:
    tokens = TokenCache(make_corpus(tmp_path, "a"), WideTokenizer()).tokens()
    assert (tokens.tolist(), tokens.dtype) == ([65_536 + 97, 256], np.dtype(np.uint32))


def test_a_second_call_tokenises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = make_corpus(tmp_path, "text")
    first = tokens_of(section)
    assert MADE in caplog.text
    caplog.clear()
    assert tokens_of(section) == first
    assert caplog.text == ""
    assert [path.suffix for path in files(section)] == [".bin"]


def test_content_and_tokenizer_are_the_key_and_names_are_not(tmp_path: Path) -> None:
    section = make_corpus(tmp_path, "one", "two")
    tokens_of(section)
    os.rename(section.source, tmp_path / "moved")
    moved = section.replace(source=str(tmp_path / "moved"))
    tokens_of(moved)
    assert len(files(section)) == 1
    tokens_of(moved, WideTokenizer())
    assert len(files(section)) == 2
    tokens_of(moved.replace(max_bytes=4))
    assert len(files(section)) == 3
    (tmp_path / "moved" / "1.txt").write_text("twa")
    assert tokens_of(moved)[-2] == ord("a")
    assert len(files(section)) == 4


def test_pieces_and_batches_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = make_corpus(tmp_path, "line one\nline two\n" * 20, "short", "é" * 100)
    whole = tokens_of(section)
    monkeypatch.setattr(readers, "_PIECE_BYTES", 16)
    monkeypatch.setattr(encode, "_BATCH_BYTES", 50)
    monkeypatch.setattr(encode, "_MAX_BYTES_AT_ONCE", 120)
    assert tokens_of(section.replace(cache_dir=str(tmp_path / "other"))) == whole


@pytest.mark.parametrize("damage", ["truncate", "empty", "header", "tokens", "extend"])
def test_damage_is_found_and_made_good(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    section = make_corpus(tmp_path, "text " * 100)
    good = tokens_of(section)
    (path,) = files(section)
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[50] ^= 1
    elif damage == "tokens":
        data[4096 + 321] ^= 4
    damaged = {"truncate": data[:-2], "empty": b"", "extend": data + b"\0\0"}.get(damage, data)
    path.write_bytes(damaged)
    caplog.clear()
    assert tokens_of(section) == good
    assert [record.levelname for record in caplog.records if "damaged" in record.message] == ["WARNING"]
    caplog.clear()
    assert tokens_of(section) == good
    assert caplog.text == ""


def test_a_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    section, other = make_corpus(tmp_path / "a", "first"), make_corpus(tmp_path / "b", "other")
    good = tokens_of(section)
    tokens_of(other)
    (path,), (foreign,) = files(section), files(other)
    path.write_bytes(foreign.read_bytes())
    assert tokens_of(section) == good


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    section = make_corpus(tmp_path, "text")
    good = tokens_of(section)
    (path,) = files(section)
    path.unlink()
    path.with_suffix(".partial").write_bytes(b"x" * 10_000)
    assert tokens_of(section) == good
    assert files(section) == [path]


RANK = """
import sys, time
from pathlib import Path
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.spec.job.sections import DataSection

source, cache_dir, ledger, delay_s, start = sys.argv[1:]

class Telling(ByteTokenizer):
    def encode_batch(self, texts):
        with open(ledger, "a") as file:
            file.write("tokenises\\n")
        time.sleep(float(delay_s))
        return super().encode_batch(texts)

print("ready", flush=True)
while not Path(start).exists():
    time.sleep(0.001)
tokens = TokenCache(DataSection(source=source, cache_dir=cache_dir), Telling()).tokens()
print(int(tokens.astype("int64").sum()), flush=True)
"""


class Rank:
    """A process of its own that builds the cache once `start` exists."""

    def __init__(self, section: DataSection, ledger: Path, delay_s: float, start: Path) -> None:
        arguments = [section.source, section.cache_dir, str(ledger), str(delay_s), str(start)]
        self.process = subprocess.Popen([sys.executable, "-c", RANK, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start_rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def start(section: DataSection, delay_s: float) -> Rank:
        ranks.append(Rank(section, tmp_path / "ledger", delay_s, tmp_path / "start"))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.end()


@pytest.mark.slow
def test_processes_that_start_at_once_tokenise_once(tmp_path: Path, start_rank: Callable[..., Rank]) -> None:
    section = make_corpus(tmp_path, "some text\n" * 100_000)
    ranks = [start_rank(section, delay_s=0.2) for _ in range(3)]
    (tmp_path / "start").touch()
    assert {rank.line() for rank in ranks} == {str(sum(b"some text\n") * 100_000 + 256)}
    assert (tmp_path / "ledger").read_text() == "tokenises\n"
    assert len(files(section)) == 1


@pytest.mark.slow
def test_a_waiting_process_goes_on_when_the_writer_is_killed(tmp_path: Path, start_rank: Callable[..., Rank]) -> None:
    section, ledger = make_corpus(tmp_path, "text"), tmp_path / "ledger"
    writer = start_rank(section, delay_s=600)
    (tmp_path / "start").touch()
    while not ledger.exists():
        time.sleep(0.01)
    waiter = start_rank(section, delay_s=0)
    time.sleep(0.5)
    assert ledger.read_text() == "tokenises\n", "the waiter did not wait"
    writer.end()
    assert waiter.line() == str(sum(b"text") + 256)
    assert ledger.read_text() == "tokenises\n" * 2
    assert len(files(section)) == 1


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(ByteTokenizer):
        def encode_batch(self, texts: Any) -> Any:
            raise KeyboardInterrupt

    section = make_corpus(tmp_path, "text")
    with pytest.raises(KeyboardInterrupt):
        TokenCache(section, Failing()).tokens()
    assert files(section) == []


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    section = make_corpus(tmp_path, "text")

    class Meddling(ByteTokenizer):
        @property
        def end_of_text(self) -> int:  # type: ignore[override]
            # Asked for between hashing and tokenising.
            (tmp_path / "corpus" / "0.txt").write_text("other")
            return 256

    with pytest.raises(DataError, match=r"corpus' changed while it was read"):
        TokenCache(section, Meddling()).tokens()
    assert files(section) == []


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    section = make_corpus(tmp_path, "text", cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"data.cache_dir = '.*/file/cache' cannot hold the token cache \(Not a dir"):
        TokenCache(section, ByteTokenizer()).tokens()


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    section = make_corpus(tmp_path, "text", cache_dir="/proc/self")
    if not Path("/proc/self").exists():
        pytest.skip("needs Linux's /proc, which refuses files also to root")
    with pytest.raises(DataError, match=r"data.cache_dir = '/proc/self' cannot hold the token cache \("):
        TokenCache(section, ByteTokenizer()).tokens()


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    section = make_corpus(tmp_path, "text" * 100_000)
    said = r"cache' has no room for about 781 KiB of tokens .*free some space there"
    with no_file_larger_than(100_000), pytest.raises(DataError, match=said):
        TokenCache(section, ByteTokenizer()).tokens()
    assert files(section) == []
    assert len(tokens_of(section)) == 400_001


def test_a_finished_cache_is_used_from_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = make_corpus(tmp_path, "text")
    good = tokens_of(section)

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(os, "open", refuse)
    assert tokens_of(section) == good
