"""`mw.datasets` and `meshwright data`: what they return, print and exit with; a user's data and bad input."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from chat_tokenizer import write_chat_tokenizer
from meshwright.cli.main import run
from meshwright.data.cache import content
from meshwright.data.dataset import build_dataset
from meshwright.data.open_loader import open_loader
from meshwright.data.order import SampleOrder, Share
from meshwright.errors import ConfigError, DataError, ExitCode, MeshwrightError, UnsupportedError

DOCUMENTS = ["first document\n" * 20, "second\n" * 40, "third one\n" * 30]


class MyNumbers:
    """Samples of a user's own."""

    def __init__(self, bad: tuple[int, ...] = (), random: tuple[int, ...] = ()) -> None:
        self._bad, self._random, self._reads = set(bad), set(random), 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self._reads += 1
        if index in self._bad:
            raise ValueError(f"row {index} is gone")
        shift = self._reads if index in self._random else 0
        return np.full(3, index + shift, np.float32), index


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(content, "PART_BYTES", 100)
    monkeypatch.setitem(sys.modules, "my_numbers", sys.modules[MyNumbers.__module__])
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    lines = ["[data]", 'source = "texts"', 'cache_dir = "cache"', "[train]", "seq_len = 32", "steps = 10"]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    return tmp_path / "job.toml"


def own(job: Path, **options: Any) -> Path:
    """Return a job with the data of this file, and a model that takes them."""
    path = job.with_name("own.toml")
    text = job.read_text().replace('"texts"', '"my_numbers:MyNumbers"')
    text += '\n[model]\nsource = "my_numbers:MyModel"'
    path.write_text(text + ("\n[data.options]\n" + "\n".join(f"{k} = {list(v)}" for k, v in options.items())))
    return path


def tokens_in(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.glob("*.bin")]


def test_what_is_prepared_is_what_training_makes_and_finds(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = mw.datasets.prepare(job)
    (one,) = result.sources
    assert (one.num_parts, one.num_parts_made, one.num_parts_missing) == (3, 3, 0)
    assert one.num_tokens == sum(len(text) + 1 for text in DOCUMENTS)
    caplog.set_level(logging.INFO, logger="meshwright")
    caplog.clear()
    build_dataset(mw.load_job(job).job.data, 32)
    assert "tokenising" not in caplog.text
    build_dataset(mw.load_job(job, "data.cache_dir=other").job.data, 32)
    assert tokens_in(job.parent / "cache") == tokens_in(job.parent / "other")
    assert mw.datasets.prepare(job).sources[0].num_parts_made == 0


def test_shards_are_counted_and_joined(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "prepare", str(job), "--shard", "1/2"]) == 0
    printed = capsys.readouterr().out
    assert "2 parts missing, of other shards: 0, 2" in printed
    # There is no such file yet.
    assert ".bin" not in printed
    first = mw.datasets.prepare(job, shard="0/2")
    assert not first.is_complete
    assert (first.sources[0].num_parts_made, first.sources[0].num_parts_missing) == (2, 0)
    assert "call once without --shard" in first.table()
    whole = mw.datasets.prepare(job)
    assert (whole.is_complete, whole.sources[0].num_parts_made) == (True, 0)


def test_documents_that_are_left_out_are_said(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts" / "z.txt").write_bytes(b"\xff")
    assert run(["data", "prepare", str(job), "data.on_bad_document=skip"]) == 0
    assert "- left out 1 document that cannot be read:\n  texts/z.txt is no UTF-8" in capsys.readouterr().out


@pytest.mark.parametrize("shard", ["2/2", "0/0", "a/b", "1", "-1/2"])
def test_an_impossible_shard_is_refused(job: Path, shard: str) -> None:
    with pytest.raises(ConfigError, match=r"must be I/N"):
        mw.datasets.prepare(job, shard=shard)


def test_statistics_add_up(job: Path) -> None:
    found = mw.datasets.stats(job)
    (one,) = found.sources
    lengths = [len(text) + 1 for text in DOCUMENTS]
    assert sum(each.num_documents for each in one.lengths) == one.num_documents == len(DOCUMENTS)
    assert sum(each.num_tokens for each in one.lengths) == one.num_tokens == sum(lengths)
    assert one.num_longer == 3
    assert one.bytes_per_token == pytest.approx((sum(lengths) - 3) / sum(lengths))
    assert found.num_training_samples + found.num_validation_samples == (sum(lengths) - 1) // 32
    assert found.epochs == pytest.approx(10 * 8 / found.num_training_samples)
    assert found.sample_shapes == ["int64 [32]", "int64 [32]"]
    assert "epochs" in found.table()


def test_a_preview_is_of_the_samples_that_the_step_reads(job: Path) -> None:
    found = mw.datasets.preview(job, step=4, count=8)
    resolved = mw.load_job(job).job
    dataset = build_dataset(resolved.data, 32)
    indices = SampleOrder(dataset.num_training_samples, resolved.train.seed).samples_at(np.arange(24, 32))
    assert [one.sample for one in found.samples] == indices.tolist()
    for one in found.samples:
        inputs, targets = dataset.sample(one.sample)
        ids = [*inputs, targets[-1]]
        assert "".join(segment.text for segment in one.segments) == bytes(int(i) for i in ids if i < 256).decode()


def test_a_preview_shows_where_documents_end_and_are_from(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boundary = (len(DOCUMENTS[0])) // 32
    assert run(["data", "preview", str(job), "--sample", str(boundary), "--count", "1"]) == 0
    printed = capsys.readouterr().out
    assert "texts/0.txt, texts/1.txt" in printed
    assert "│ second" in printed
    assert "\n──\n" in printed


def test_a_preview_says_which_answer_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "Q ", "chosen": "good", "rejected": "bad"}\n' * 2)
    (tmp_path / "dpo.toml").write_text(
        f'[data]\nsource = "pairs.jsonl"\npacking = "whole"\nmask_documents = true\nvalidation_fraction = 0.0\n'
        f'cache_dir = "{tmp_path}"\n[train]\ntask = "dpo"\nseq_len = 64\n'
    )
    table = mw.datasets.preview(tmp_path / "dpo.toml", sample=0).table()
    # Wrapped where the folder's name is long.
    assert "/pairs.jsonl:1," in "".join(table.split())
    words = [line for line in table.splitlines() if line in ("chosen:", "│ good", "rejected:", "│ bad")]
    assert words == ["chosen:", "│ good", "rejected:", "│ bad"] * 2


@pytest.mark.parametrize("packing", ["none", "whole"])
def test_a_preview_of_conversations_says_which_file_and_line_each_is_of(tmp_path: Path, packing: str) -> None:
    (tmp_path / "chats").mkdir()
    for name in ("a", "b"):
        turns = [{"role": "user", "content": name}, {"role": "assistant", "content": "yes"}]
        silent = json.dumps({"messages": turns[:1]})
        # A record without a target is left out, a blank line is none.
        text = f"{silent}\n\n" + "".join(json.dumps({"messages": turns}) + "\n" for _ in range(2))
        (tmp_path / "chats" / f"{name}.jsonl").write_text(text)
    (tmp_path / "sft.toml").write_text(
        f'[data]\nsource = "chats"\npacking = "{packing}"\nmask_documents = true\nvalidation_fraction = 0.0\n'
        f'cache_dir = "{tmp_path}"\n[train]\ntask = "sft"\nseq_len = 256\n'
    )
    found = mw.datasets.preview(tmp_path / "sft.toml", sample=0, count=4)
    places = [Path(place).name for one in found.samples for place in one.places]
    assert sorted(places) == ["a.jsonl:3", "a.jsonl:4", "b.jsonl:3", "b.jsonl:4"]
    first = found.samples[0]
    assert Path(first.places[0]).name[0] in "".join(one.text for one in first.segments)


def test_a_preview_marks_what_is_learned_alone(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "p", "completion": ""}\n')
    (tmp_path / "sft.toml").write_text(
        f'[data]\nsource = "one.jsonl"\npacking = "none"\nvalidation_fraction = 0.0\ncache_dir = "{tmp_path}"\n'
        '[train]\ntask = "sft"\nseq_len = 16\n'
    )
    table = mw.datasets.preview(tmp_path / "sft.toml", sample=0).table()
    assert ": 1 target, 15 ignored" in table
    # End of text is learned, which the byte tokenizer has no characters for.
    assert "· p\n│ \n──" in table
    both = mw.datasets.preview(tmp_path / "sft.toml", 'data.train_on="all"', sample=0).table()
    assert "│ p\n──" in both


def test_a_preview_lets_no_control_character_through(job: Path, tmp_path: Path) -> None:
    (tmp_path / "texts" / "0.txt").write_text("\x1b[31mred\x07\n" * 100)
    table = mw.datasets.preview(job, sample=0).table()
    assert "\\x1b[31mred\\x07" in table
    assert "\x1b" not in table


def test_which_samples_must_be_one_thing_and_exist(job: Path) -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        mw.datasets.preview(job, step=1, sample=1)
    with pytest.raises(ConfigError, match=r"less than the .* training samples"):
        mw.datasets.preview(job, sample=10**6)


def test_valid_data_is_said_to_be(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = mw.datasets.verify(job)
    assert (found.is_valid, found.caches, found.num_samples) == (True, ["absent"], 0)
    mw.datasets.prepare(job)
    assert run(["data", "verify", str(job), "--samples", "7"]) == 0
    printed = capsys.readouterr().out
    assert "token cache: intact" in printed
    assert printed.startswith("texts: valid\n")
    assert "7 of " in printed
    assert " samples read twice" in printed


def test_what_is_beyond_max_bytes_is_said_not_to_be_read(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "verify", str(job), "data.max_bytes=400"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("texts: valid up to data.max_bytes, the rest was not read\n")
    assert "- texts: stopped at data.max_bytes = 400: 1 of 3 files not read\n" in printed
    assert mw.datasets.verify(job, "data.max_bytes=400").to_dict()["unread"][0]["num_files_unread"] == 1
    assert mw.datasets.verify(job).unread == []


def test_all_corrupt_records_and_exit_code(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "good"}\n{"text": 1}\n{"txt": ""}\n')
    (tmp_path / "texts" / "z.txt").write_bytes(b"\xff")
    with pytest.raises(SystemExit, match=str(int(ExitCode.BAD_INPUT))):
        run(["data", "verify", str(job), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["num_problems"] == len(found["problems"]) == 3
    assert [Path(one["where"]).name for one in found["problems"]] == ["a.jsonl", "a.jsonl", "z.txt"]


def test_a_damaged_cache_is_named_and_made_again(job: Path) -> None:
    path = Path(mw.datasets.prepare(job).sources[0].path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    found = mw.datasets.verify(job)
    assert (found.num_problems, found.caches) == (1, ["damaged"])
    assert str(path) in found.problems[0].where
    assert mw.datasets.prepare(job).sources[0].num_parts_made == 3
    assert mw.datasets.verify(job).is_valid


def test_a_users_data_is_read_and_compared(job: Path) -> None:
    found = mw.datasets.verify(own(job), samples=1000)
    assert (found.is_valid, found.num_samples, found.num_files) == (True, 40, 0)
    assert ": valid\n" in found.table()
    assert ": valid in 3 of 40 samples, the rest was not read\n" in mw.datasets.verify(own(job), samples=3).table()
    bad = mw.datasets.verify(own(job, bad=(3, 7), random=(5,)), samples=1000)
    assert [one.where for one in bad.problems] == ["sample 3", "sample 5", "sample 7"]
    assert "ValueError: row 3 is gone" in bad.problems[0].reason


def test_an_exception_of_a_users_data_is_said_to_be_its_own(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (mw.datasets.stats, mw.datasets.preview):
        for bad in ((0,), (*range(1, 20), *range(21, 39))):
            with pytest.raises(
                MeshwrightError, match=r"ValueError came out of .* own code, .*datasets.py:\d+ in __getit"
            ):
                verb(own(job, bad=bad))
            shown = capsys.readouterr().err
            assert "row" in shown
            assert "meshwright/data" not in shown
    (problem,) = mw.datasets.verify(own(job, bad=(0,))).problems
    assert "ValueError: row 0 is gone (" in problem.reason


def test_what_training_refuses_of_a_users_samples_is_found(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(32)
    for inputs, reason in (
        (tokens[1:], r"inputs of sample 5 .* are int64 \[31\], and the model takes tokens, int64 or int32 \[32\]"),
        (tokens + 500, r"inputs of sample 5 .* hold 500 at place 0, and the model's tokens are 0 to 287: change the"),
    ):
        samples = {5: (inputs, tokens)}
        read = lambda _, index, samples=samples: samples.get(index, (tokens, tokens))  # noqa: E731
        monkeypatch.setattr(MyNumbers, "__getitem__", read)
        found = mw.datasets.verify(own(job), "model.source=llama-1m", samples=1000)
        assert [one.where for one in found.problems] == ["sample 5"]
        assert re.search(reason, found.problems[0].reason)
        resolved = mw.load_job(own(job), "model.source=llama-1m").job
        with (
            closing(open_loader(build_dataset(resolved.data, 32), Share(40), resolved)) as loader,
            pytest.raises(DataError, match=re.escape(found.problems[0].reason)),
        ):
            loader.microbatches_of(np.array([[5]]))


def test_samples_that_are_no_numbers_are_named(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for values in ("text", [[1, 2], [3]], {"a": 1}):
        monkeypatch.setattr(MyNumbers, "__getitem__", lambda _, index, values=values: (np.zeros(3), values))
        with pytest.raises(DataError, match=r"targets of sample 0 are a (str|list|dict) that no tensor can hold"):
            mw.datasets.stats(own(job))


def test_a_length_that_is_no_number_is_one_problem(job: Path) -> None:
    path = job.with_name("uncounted.toml")
    path.write_text(job.read_text().replace('"texts"', '"sample_sources:Uncounted"'))
    (problem,) = mw.datasets.verify(path).problems
    assert "it must return the number of samples" in problem.reason


def test_a_users_data_has_shapes_and_nothing_to_prepare(job: Path) -> None:
    found = mw.datasets.preview(own(job), sample=2, count=1)
    assert found.samples[0].shapes == ["float32 [3]", "int64 []"]
    assert found.samples[0].segments == []
    assert "float32 [3]" in found.table()
    stats = mw.datasets.stats(own(job))
    assert (stats.sources, stats.num_training_samples + stats.num_validation_samples) == ([], 40)
    with pytest.raises(UnsupportedError, match="nothing can be prepared"):
        mw.datasets.prepare(own(job))


def test_an_empty_corpus_is_one_error(job: Path, tmp_path: Path) -> None:
    for file in (tmp_path / "texts").iterdir():
        os.truncate(file, 0)
    for verb in (mw.datasets.prepare, mw.datasets.stats, mw.datasets.preview):
        with pytest.raises(DataError, match="holds no text"):
            verb(job)
    assert mw.datasets.verify(job).num_problems == 1


def test_too_little_to_learn_from_is_found_before_anything_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Nobody answers."}]}\n' * 3)
    job = tmp_path / "sft.toml"
    job.write_text(
        '[data]\nsource = "chats.jsonl"\ncache_dir = "cache"\npacking = "none"\n[train]\ntask = "sft"\nseq_len = 64\n'
    )
    before = mw.datasets.verify(job)
    assert "holds 0 documents to learn from" in before.problems[0].reason
    mw.datasets.prepare(job)
    assert mw.datasets.verify(job).problems[0].reason == before.problems[0].reason


def test_special_tokens_are_shown_where_they_are_learned(tmp_path: Path) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    job = tmp_path / "sft.toml"
    job.write_text(
        f'[data]\nsource = "chats.jsonl"\ncache_dir = "cache"\ntokenizer = "{tokenizer}"\npacking = "none"\n'
        '[train]\ntask = "sft"\nseq_len = 64\nvalidation_interval = 0\n'
    )
    shown = mw.datasets.preview(job, "data.validation_fraction=0", sample=0, count=1).samples[0].segments
    assert "Hello<|im_end|>" in next(one.text for one in shown if one.is_target)


@pytest.mark.parametrize("verb", ["prepare", "stats", "preview", "verify"])
def test_results_as_json_rows_and_lines(job: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    assert run(["data", verb, str(job), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    result = getattr(mw.datasets, verb)(job)
    assert set(found) == set(result.to_dict())
    assert repr(result).startswith("<")
    result.to_pandas()


def test_a_prepared_folder_stands_for_its_text(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "prepare", str(job), "--out", str(tmp_path / "out")]) == 0
    assert f"data.source={tmp_path / 'out'}" in capsys.readouterr().out
    source = f"data.source={tmp_path / 'out'}"
    text, stored = mw.datasets.stats(job), mw.datasets.stats(job, source)
    assert stored.sources[0].lengths == text.sources[0].lengths
    assert stored.num_training_samples == text.num_training_samples
    shown, other = (mw.datasets.preview(job, *more, step=1).samples for more in ((), (source,)))
    assert [one.segments for one in shown] == [one.segments for one in other]
    assert mw.datasets.verify(job, source).is_valid
    data = bytearray((tmp_path / "out" / "tokens.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "out" / "tokens.bin").write_bytes(data)
    assert mw.datasets.verify(job, source).num_problems == 1


def test_what_out_cannot_hold_is_refused_before_the_work(job: Path, tmp_path: Path) -> None:
    for options in ({"out": tmp_path}, {"out": tmp_path / "new", "shard": "0/2"}):
        with pytest.raises(ConfigError, match="--out"):
            mw.datasets.prepare(job, **options)
    assert not (tmp_path / "cache").exists()
