"""Documents of every format, by the suffix of their file, on this machine and at a URL."""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data.cache.content import content_of
from meshwright.data.data_problems import problems
from meshwright.data.sources import list_files, pieces
from meshwright.errors import DataError, DataUnavailable
from meshwright.spec.job.sections import DataSection
from s3_server import s3_server
from written_corpora import write_mds, write_tar

TEXTS = [f"document {number} é\n" * (number % 5 + 1) for number in range(2500)]


def documents(source: Path | str, **options: Any) -> list[str]:
    found, open_document = [], b""
    for piece in pieces(DataSection(source=str(source), **options)):
        open_document += piece.utf8
        if piece.ends_document:
            found.append(open_document.decode())
            open_document = b""
    return found


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()


def write_arrow(path: Path, new_writer: Callable[[str, pa.Schema], Any], texts: list[str]) -> Path:
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    with new_writer(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=999)
    return path


def zstd(data: bytes) -> bytes:
    compressed: bytes = pa.compress(data, "zstd", asbytes=True)
    return compressed


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(json_lines(TEXTS))),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json_lines(TEXTS))),
    # Two frames, as parallel compressors write them.
    "a.jsonl.zst": lambda path: path.write_bytes(zstd(json_lines(TEXTS[:9])) + zstd(json_lines(TEXTS[9:]))),
    "a.arrow": lambda path: write_arrow(path, pa.ipc.new_file, TEXTS),
    "stream.arrow": lambda path: write_arrow(path, pa.ipc.new_stream, TEXTS),
    "a.tar": lambda path: write_tar(path, {f"{n}.json": json.dumps({"text": t}).encode() for n, t in enumerate(TEXTS)}),
    "a.tar.gz": lambda path: write_tar(
        path, {f"{n}.json": json.dumps({"text": t}).encode() for n, t in enumerate(TEXTS)}
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_each_format_has_its_documents_in_order(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert documents(tmp_path / name) == TEXTS
    assert documents(tmp_path) == TEXTS, "from its folder"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.tar.gz"])
def test_a_compressed_file_that_ends_early_is_named(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"{name} is truncated or damaged .*: replace it"):
        documents(tmp_path / name)


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", [*WRITERS, "a.parquet", "a.mds"])
def test_a_damaged_file_of_any_format_is_an_error_of_the_data(
    damaged: Callable[[str], bytes], tmp_path: Path, name: str, data: st.DataObject
) -> None:
    content = bytearray(damaged(name))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(content)), st.integers(0, 255)), max_size=4)):
        content[place : place + 1] = [value]
    (tmp_path / name).write_bytes(content)
    section = DataSection(source=str(tmp_path / name), on_bad_document="skip")
    with suppress(DataError):
        assert all(piece.text is not None for piece in pieces(section))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Return what makes a valid file of a format, of few documents."""
    folder = tmp_path_factory.mktemp("valid")
    pq.write_table(pa.table({"text": TEXTS[:50]}), folder / "a.parquet")
    write_mds(folder / "mds", {"text": "str"}, [[{"text": text} for text in TEXTS[:50]]])
    (folder / "mds" / "shard.00000.mds").rename(folder / "a.mds")
    for name, write in WRITERS.items():
        write(folder / name)
    return lambda name: (folder / name).read_bytes()


def test_text_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    (tmp_path / "b.md.zst").write_bytes(zstd(b"two"))
    assert documents(tmp_path) == ["one", "two"]


def test_a_tar_has_members_of_an_extension_or_a_field_of_json(tmp_path: Path) -> None:
    members = {"d.x/1.txt": b"one", "d.x/1.json": b'{"text": "uno"}', "d.x/1.jpg": b"\xff", "d.x/2.txt": b"two"}
    path = write_tar(tmp_path / "a.tar", members)
    assert documents(path, text_key=".txt") == ["one", "two"]
    assert documents(path) == ["uno"]
    assert documents(path, text_key=".json") == ['{"text": "uno"}']
    with pytest.raises(DataError, match=r"no member with '.text' \(extensions of its members: .txt, .json, "):
        documents(path, text_key=".text")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "no JSON .*: each .json member of an archive .* remove the member"),
        (b"[]", "a JSON array, .* each .json member"),
    ],
)
def test_a_member_that_is_no_json_is_told_of_members(tmp_path: Path, content: bytes, problem: str) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.json": content})
    with pytest.raises(DataError, match=f"member 1.json is {problem}"):
        documents(path)


@pytest.mark.parametrize("num_bytes", [512 * 5, 512 * 5 + 100, 512 * 4 + 20, 512 * 6])
def test_a_truncated_tar_is_named_wherever_it_ends(tmp_path: Path, num_bytes: int) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{n}.txt": b"x" * 600 for n in range(2)})
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=r"a\.tar is truncated or damaged"):
        documents(path, text_key=".txt")


def test_an_arrow_file_that_ends_early_is_named_with_its_row(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.ipc.new_stream, TEXTS)
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(DataError, match=r"a\.arrow is truncated or damaged after row \d+"):
        documents(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.arrow is no Arrow file"):
        documents(path)


def save_to_disk(folder: Path, *shards: list[str]) -> Path:
    """Write what save_to_disk of datasets 5.2 does."""
    folder.mkdir()
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        write_arrow(folder / name, pa.ipc.new_stream, texts)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_consists_of_the_files_of_its_state(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", TEXTS[:1000], TEXTS[1000:])
    write_arrow(folder / "cache-1.arrow", pa.ipc.new_stream, ["of a map"])
    assert documents(folder) == TEXTS
    next(folder.glob("data-00001*")).unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002.arrow does not exist"):
        documents(folder)


def test_of_several_splits_one_is_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"splits train, test: name the folder of one, such as '.*/train'"):
        documents(tmp_path)


def test_rows_of_mds_are_documents(tmp_path: Path) -> None:
    rows = [{"n": n, "text": text, "url": "u" * (n % 4)} for n, text in enumerate(TEXTS)]
    folder = write_mds(tmp_path / "mds", {"n": "int", "text": "str", "url": "str"}, [rows[:900], rows[900:]])
    assert documents(folder) == TEXTS
    shard = folder / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"shard.00001.mds is truncated or damaged \(it ends in row 1600 of 1600\)"):
        documents(folder)


def changed_index(folder: Path, **changes: Any) -> Path:
    index = json.loads((folder / "index.json").read_text())
    shard = index["shards"][-1]
    shard.update((key, value) for key, value in changes.items() if key in shard)
    shard["raw_data"].update((key, value) for key, value in changes.items() if key not in shard)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("changes", [{"samples": 10**9}, {"bytes": 7}])
@pytest.mark.parametrize("encoding", ["str", "ndarray:int32"])
def test_shards_must_be_what_the_index_of_mds_lists(tmp_path: Path, changes: dict[str, Any], encoding: str) -> None:
    value: Any = "a" if encoding == "str" else np.arange(3, dtype=np.int32)
    folder = write_mds(tmp_path / "mds", {"text": encoding}, 2 * [3 * [{"text": value}]])
    section = DataSection(source=str(folder), cache_dir=str(tmp_path / "cache"))
    assert not problems(section, 2, 300)
    changed_index(folder, **changes)
    (problem,) = problems(section, 2, 300)
    assert "shard.00001.mds has 3 rows in" in problem
    assert f"lists {changes.get('samples', 3)} in" in problem


@pytest.mark.parametrize("name", ["../secret.mds", "/etc/passwd", "..", ""])
def test_an_index_of_mds_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    folder = changed_index(write_mds(tmp_path / "mds", {"text": "str"}, [[{"text": "a"}]]), basename=name)
    (problem,) = problems(DataSection(source=str(folder)), 2, 300)
    assert f"lists a shard {name!r}, which is no file's name in its folder" in problem


def test_compressed_mds_is_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "mds", {"text": "str"}, [[{"text": "a"}]])
    index = (folder / "index.json").read_text().replace('"compression": null', '"compression": "zstd"')
    (folder / "index.json").write_text(index)
    with pytest.raises(DataError, match=r"only uncompressed MDS of version 2 is read"):
        documents(folder)


@pytest.fixture
def memory() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/corpus", recursive=True)


@pytest.mark.parametrize("name", WRITERS)
def test_a_url_is_read_as_a_file_is(tmp_path: Path, memory: Any, name: str) -> None:
    WRITERS[name](tmp_path / name)
    memory.pipe(f"/corpus/{name}", (tmp_path / name).read_bytes())
    memory.pipe("/corpus/image.png", b"\xff")
    assert documents(f"memory://corpus/{name}") == TEXTS
    assert documents("memory://corpus") == TEXTS
    assert documents(f"file://{tmp_path}") == TEXTS


def test_a_bucket_of_s3_is_read_as_a_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as (bucket, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        WRITERS["a.jsonl.gz"](tmp_path / "a.jsonl.gz")
        store.pipe(f"{bucket}/texts/a.jsonl.gz", (tmp_path / "a.jsonl.gz").read_bytes())
        store.pipe(f"{bucket}/texts/b/c.txt", b"the last")
        assert documents(f"s3://{bucket}/texts") == [*TEXTS, "the last"]
        assert documents(f"s3://{bucket}/texts/b/c.txt") == ["the last"]
        with pytest.raises(DataError, match="does not exist"):
            documents(f"s3://{bucket}/none.txt")


def test_files_of_a_url_that_change_are_read_again(tmp_path: Path, memory: Any) -> None:
    section = DataSection(source="memory://corpus", cache_dir=str(tmp_path))
    memory.pipe("/corpus/a.txt", b"one")
    before = content_of(section)
    assert content_of(section) == before
    memory.pipe("/corpus/a.txt", b"two")
    assert content_of(section).content_hash != before.content_hash


def test_a_url_that_is_wrong_is_named(memory: Any) -> None:
    memory.pipe("/corpus/a.png", b"one")
    for url, match in (
        ("memory://corpus", "is a folder without text"),
        ("memory://corpus/none.txt", "does not exist"),
        ("nothing://corpus", "is no URL that fsspec knows"),
    ):
        with pytest.raises(DataError, match=match):
            list_files(DataSection(source=url))


def test_a_store_that_fails_may_work_again(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/corpus/a.txt", b"one")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(type(memory), "open", fail)
    with pytest.raises(DataUnavailable, match=r"a.txt cannot be read \(RuntimeError: connection reset\)"):
        documents("memory://corpus/a.txt")
