"""A corpus is tokenised in parts: finished ones outlive a kill, may be made elsewhere, and leave no trace."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from full_disk import no_file_larger_than
from meshwright.data.cache import content, encode, token_file
from meshwright.data.cache.content import measure, parts_of
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.cache.token_file import write_tokens
from meshwright.data.formats.readers import Piece
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

NUM_FILES = 10
TEXTS = [f"text number {number}\n" * 10 for number in range(NUM_FILES)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is a part, and a batch."""
    monkeypatch.setattr(content, "PART_BYTES", 100)
    monkeypatch.setattr(encode, "_BATCH_BYTES", 100)


@pytest.fixture
def section(tmp_path: Path) -> DataSection:
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    return DataSection(source=str(tmp_path / "corpus"), cache_dir=str(tmp_path / "cache"))


class Counting(ByteTokenizer):
    """Notes the texts that it encodes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_batch(self, texts: Any) -> Any:
        self.texts += texts
        return super().encode_batch(texts)


def part_files(section: DataSection) -> list[Path]:
    return sorted((Path(section.cache_dir) / "parts").glob("*.bin"))


def whole_file(section: DataSection) -> bytes:
    (path,) = Path(section.cache_dir).glob("*.bin")
    return path.read_bytes()


def in_one_part(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return the file that is made of the whole corpus at once."""
    other = section.replace(cache_dir=f"{section.cache_dir}-other")
    with monkeypatch.context() as patch:
        patch.setattr(content, "PART_BYTES", 2**30)
        assert len(TokenCache(other, ByteTokenizer()).content.parts) == 1
        TokenCache(other, ByteTokenizer()).tokens()
    return whole_file(other)


def test_parts_give_the_bytes_of_one_and_are_removed(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TokenCache(section, ByteTokenizer()).tokens()
    assert tokens.tolist() == [token for text in TEXTS for token in (*text.encode(), 256)]
    assert whole_file(section) == in_one_part(section, monkeypatch)
    assert part_files(section) == []


@given(sizes=st.lists(st.tuples(st.integers(1, 250), st.booleans()), max_size=20))
def test_parts_are_runs_of_whole_pieces(sizes: list[tuple[int, bool]]) -> None:
    pieces = [Piece(b"x" * size, ends) for size, ends in sizes]
    parts = [list(part) for _, part in parts_of(pieces)]
    assert [piece for part in parts for piece in part] == pieces
    part_bytes = [sum(len(piece.utf8) for piece in part) for part in parts]
    assert all(size >= 100 for size in part_bytes[:-1])
    assert [part.num_bytes for part in measure(pieces).parts] == part_bytes


def test_an_interrupted_pass_goes_on(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Counting):
        def encode_batch(self, texts: Any) -> Any:
            if texts == [TEXTS[4]]:
                raise KeyboardInterrupt
            return super().encode_batch(texts)

    with pytest.raises(KeyboardInterrupt):
        TokenCache(section, Interrupted()).tokens()
    assert len(part_files(section)) == 4
    again = Counting()
    TokenCache(section, again).tokens()
    assert again.texts == TEXTS[4:]
    assert whole_file(section) == in_one_part(section, monkeypatch)


SLOW = """
import sys, time
from meshwright.data.cache import content, encode, token_file
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.spec.job.sections import DataSection

content.PART_BYTES = encode._BATCH_BYTES = 100

class Slow(ByteTokenizer):
    def encode_batch(self, texts):
        time.sleep(0.05)
        return super().encode_batch(texts)

TokenCache(DataSection(source=sys.argv[1], cache_dir=sys.argv[2]), Slow()).tokens()
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [1, 5, 9])
def test_what_is_finished_outlives_a_kill(
    section: DataSection, monkeypatch: pytest.MonkeyPatch, num_parts: int
) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW, section.source, section.cache_dir])
    while len(part_files(section)) < num_parts and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    num_finished = len(part_files(section))
    assert num_parts <= num_finished < NUM_FILES + 1
    again = Counting()
    TokenCache(section, again).tokens()
    assert again.texts == TEXTS[num_finished:]
    assert whole_file(section) == in_one_part(section, monkeypatch)
    assert [path.name for path in Path(section.cache_dir).rglob("*.partial")] == []


def test_shards_in_any_order_are_joined(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for shard in (2, 0, 1):
        tokenizer = Counting()
        cache = TokenCache(section, tokenizer)
        cache.build_parts(range(shard, NUM_FILES, 3))
        made += tokenizer.texts
        assert len(cache.parts_missing) == NUM_FILES - len(made)
        assert cache.open() is None
    assert sorted(made) == sorted(TEXTS)
    last = Counting()
    TokenCache(section, last).tokens()
    assert last.texts == []
    assert whole_file(section) == in_one_part(section, monkeypatch)
    after = TokenCache(section, last)
    after.build_parts(range(NUM_FILES))
    assert (last.texts, after.parts_missing) == ([], [])


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_part_is_made_again(section: DataSection, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    TokenCache(section, ByteTokenizer()).build_parts(range(NUM_FILES))
    part = part_files(section)[3]
    data = bytearray(part.read_bytes())
    data[4096 + 7] ^= 1
    part.write_bytes({"flip": bytes(data), "truncate": data[:-2]}.get(damage, b""))
    if damage == "remove":
        part.unlink()
    tokenizer = Counting()
    TokenCache(section, tokenizer).tokens()
    assert len(tokenizer.texts) == 1
    assert whole_file(section) == in_one_part(section, monkeypatch)


def test_a_changed_file_costs_its_own_part_only(section: DataSection) -> None:
    TokenCache(section, ByteTokenizer()).build_parts(range(NUM_FILES))
    changed = Path(section.source) / "6.txt"
    changed.write_text("other text\n" * 20)
    tokenizer = Counting()
    tokens = TokenCache(section, tokenizer).tokens()
    assert tokenizer.texts == ["other text\n" * 20]
    assert bytes(tokens[tokens < 256].astype("u1")).count(b"other text") == 20


@pytest.mark.parametrize("change", ["other text", None])
def test_a_file_that_changes_or_vanishes_between_passes_is_named(section: DataSection, change: str | None) -> None:
    cache = TokenCache(section, ByteTokenizer())
    file = Path(section.source) / "6.txt"
    file.unlink() if change is None else file.write_text(change)
    with pytest.raises(DataError, match="changed while it was read"):
        cache.tokens()
    # What was made before the change is of the old text, and is kept under its hash.
    assert len(part_files(section)) == 6


def test_a_full_disk_keeps_what_is_finished(section: DataSection) -> None:
    (Path(section.source) / "5.txt").write_text("large " * 10_000)
    tokenizer = Counting()
    with no_file_larger_than(50_000), pytest.raises(DataError, match=r"has no room .*finished ones are kept"):
        TokenCache(section, tokenizer).tokens()
    assert len(part_files(section)) == 5
    again = Counting()
    TokenCache(section, again).tokens()
    assert again.texts[0].startswith("large")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_said_at_any_write(section: DataSection, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Also when the parts are joined; a second call, with room, continues there."""

    def write(file: BinaryIO, key: str, *rest: Any) -> int:
        num_tokens = write_tokens(file, key, *rest)
        writes.append(key)
        if len(writes) == fails_at:
            raise OSError(code, os.strerror(code))
        return num_tokens

    for fails_at in (1, NUM_FILES, NUM_FILES + 1):
        writes: list[str] = []
        here = section.replace(cache_dir=f"{section.cache_dir}-{fails_at}")
        with monkeypatch.context() as patch:
            patch.setattr(token_file, "write_tokens", write)
            with pytest.raises(DataError, match=r"has no room for about .* KiB of tokens"):
                TokenCache(here, ByteTokenizer()).tokens()
        assert len(part_files(here)) == fails_at - 1
        again = Counting()
        TokenCache(here, again).tokens()
        assert again.texts == TEXTS[fails_at - 1 :]


def test_two_corpora_may_share_parts(section: DataSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is joined removes parts that the other is about to join."""
    longer = section.replace(source=str(tmp_path / "longer"))
    (tmp_path / "longer").mkdir()
    for number, text in enumerate([*TEXTS, "more\n" * 30]):
        (tmp_path / "longer" / f"{number:02}.txt").write_text(text)
    TokenCache(longer, ByteTokenizer()).build_parts(range(NUM_FILES))
    TokenCache(section, (shared := Counting())).tokens()
    assert shared.texts == []
    tokens = TokenCache(longer, ByteTokenizer()).tokens()
    assert tokens.tolist() == [token for text in [*TEXTS, "more\n" * 30] for token in (*text.encode(), 256)]


def pieces_until(done: list[bool], count: int) -> Iterator[Piece]:
    for _ in range(count):
        yield Piece(b"x" * 100, True)
    done.append(True)


def test_no_more_than_a_few_batches_are_read_ahead() -> None:
    done: list[bool] = []
    tokens = encode.encoded(pieces_until(done, 10), ByteTokenizer())
    next(tokens)
    assert not done
    assert sum(len(run) for run in tokens) == 10 * 101 - 100


def test_a_pass_over_parts_that_are_there_reads_no_text(section: DataSection) -> None:
    cache = TokenCache(section, ByteTokenizer())
    cache.build_parts(range(NUM_FILES))
    for number in range(NUM_FILES):
        os.truncate(Path(section.source) / f"{number}.txt", 0)
    cache.build_parts(range(NUM_FILES))
    assert cache.num_parts_made == NUM_FILES
    assert len(cache.tokens()) == sum(len(text) + 1 for text in TEXTS)
