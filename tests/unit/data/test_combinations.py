"""What one part of [data] does with the others: sources, tasks, packing, mixtures, filters, workers and verbs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.config.load import ResolvedJob
from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.numbered_samples import Dataset
from meshwright.data.open_loader import open_loader
from meshwright.data.order import Share
from meshwright.errors import ConfigError, DataError, UnsupportedError
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection, Task, TrainSection
from written_corpora import write_mds, write_megatron

SEQ_LEN = 64
WORDS = ["one", "two words", "three short words", "four words are here", "the fifth document"]
END = 256


def conversation(answer: str, key: str = "messages") -> dict[str, Any]:
    return {key: [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, *records: Any) -> str:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in records))
    return str(path)


def section_of(folder: Path, **changes: Any) -> DataSection:
    own = {"cache_dir": str(folder / "cache"), "validation_fraction": 0.2, "packing": "whole", "mask_documents": True}
    return DataSection(**(own | changes))


def texts(folder: Path) -> str:
    return write_lines(folder / "texts.jsonl", *({"text": f"{word} in {n}"} for n, word in enumerate(WORDS * 4)))


def chats(folder: Path, name: str = "chats", key: str = "messages") -> str:
    return write_lines(folder / f"{name}.jsonl", *(conversation(f"{word} of {name}", key) for word in WORDS))


def megatron(folder: Path, *, with_ends: bool = True) -> str:
    documents = [[*word.encode(), *[END] * with_ends] for word in WORDS * 8]
    return str(write_megatron(folder / f"tokens{with_ends}", documents, "u2"))


def mds(folder: Path) -> str:
    rows = [{"tokens": np.array([*word.encode(), END], np.int32)} for word in WORDS * 8]
    return str(write_mds(folder / "mds", {"tokens": "ndarray:int32"}, [rows[:20], rows[20:]]))


def prepared(folder: Path, section: DataSection, task: Task = "pretrain") -> str:
    out = folder / f"prepared-{task}"
    mw.datasets.prepare(resolved(section, task), out=out)
    return str(out)


def resolved(section: DataSection, task: Task = "pretrain", **train: Any) -> ResolvedJob:
    """Return a job as the verbs take it."""
    return ResolvedJob(job_of(section, task, **train), {}, Path("job.toml"))


def job_of(section: DataSection, task: Task = "pretrain", **train: Any) -> Job:
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": 4, "steps": 3, "task": task}
    return Job(data=section, train=TrainSection(**(sizes | train)))


def mixed(folder: Path, *sources: str | dict[str, Any], **changes: Any) -> DataSection:
    tables = [one if isinstance(one, dict) else {"source": one} for one in sources]
    return section_of(folder, mixture=[{"name": f"s{n}", **table} for n, table in enumerate(tables)], **changes)


def words_of(dataset: Dataset) -> str:
    """Return all that is learned, of training and validation."""
    samples = [dataset.read(n) for n in range(dataset.num_training_samples + dataset.num_validation_samples)]
    ids = np.concatenate([sample[1] for sample in samples])
    return bytes(int(one) for one in ids if 0 <= one < END).decode()


def test_conversations_of_several_sources_with_keys_of_their_own(tmp_path: Path) -> None:
    other = {"source": chats(tmp_path, "other", "dialog"), "messages_key": "dialog"}
    section = mixed(tmp_path, chats(tmp_path), other)
    assert problems(section, SEQ_LEN, 257, "sft") == []
    assert not job_of(section, "sft").problems()
    learned = words_of(build_dataset(section, SEQ_LEN, "sft"))
    for word in WORDS:
        assert f"{word} of chats" in learned
        assert f"{word} of other" in learned
    assert "Say it" not in learned
    (problem,) = job_of(section.replace(packing="split", mask_documents=False)).problems()
    assert "table 2 (s1): messages_key" in problem


@pytest.mark.parametrize("packing", ["whole", "none"])
def test_rows_of_a_mixture_are_those_of_its_sources(tmp_path: Path, packing: str) -> None:
    one, two = (section_of(tmp_path, source=s, packing=packing) for s in (texts(tmp_path), megatron(tmp_path)))
    section = mixed(tmp_path, one.source, two.source, packing=packing)
    dataset, parts = build_dataset(section, SEQ_LEN), [build_dataset(part, SEQ_LEN) for part in (one, two)]
    assert dataset.num_training_samples == sum(part.num_training_samples for part in parts)
    first = parts[0].num_training_samples
    for mine, theirs in ((0, parts[0].sample(0)), (first, parts[1].sample(0))):
        assert [part.tolist() for part in dataset.sample(mine)] == [part.tolist() for part in theirs]
    # Validation reads each sample once, then padding without a target.
    padding = dataset.read(dataset.num_training_samples + dataset.num_validation_samples)
    assert set(padding[1].tolist()) == {-100}


def test_copies_and_broken_records_of_conversations(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", conversation("one"), conversation("two"), conversation("one"))
    second = write_lines(tmp_path / "b.jsonl", "{", conversation("two"), {"messages": 5}, conversation("three"))
    section = mixed(tmp_path, first, second, deduplicate=True, on_bad_document="skip", validation_fraction=0.0)
    dataset = build_dataset(section, SEQ_LEN, "sft")
    assert words_of(dataset) == "onetwothree"
    assert "s0: left out 1 document equal to an earlier one" in dataset.left_out
    assert "s1: left out 2 documents that cannot be read:" in dataset.left_out
    stops = section.replace(on_bad_document="stop")
    with pytest.raises(DataError, match=r"table 2 \(s1\): .*b.jsonl:1 is no JSON"):
        build_dataset(stops, SEQ_LEN, "sft")
    first, second = problems(stops, SEQ_LEN, 257, "sft")
    assert "b.jsonl:1 is no JSON" in first
    assert "b.jsonl:3: field 'messages' is 5" in second


def test_what_a_template_refuses_is_a_broken_record(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endif %}."
        "{% endfor %}"
    )
    source = write_lines(tmp_path / "a.jsonl", conversation("one"), conversation("no"), conversation("two"))
    section = section_of(tmp_path, source=source, chat_template=str(template), validation_fraction=0.0)
    with pytest.raises(DataError, match=r"a.jsonl:2: the chat template .* does not take these messages: not this"):
        build_dataset(section, SEQ_LEN, "sft")
    skips = build_dataset(section.replace(on_bad_document="skip"), SEQ_LEN, "sft")
    assert skips.left_out[0].startswith("left out 1 document")
    assert words_of(skips) == "onetwo"


@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_a_prepared_folder_is_packed_and_mixed_as_its_source(tmp_path: Path, task: Task) -> None:
    plain = section_of(tmp_path, source=texts(tmp_path) if task == "pretrain" else chats(tmp_path))
    folder = prepared(tmp_path, plain, task)
    section = plain.replace(source=folder)
    one, other = (build_dataset(part, SEQ_LEN, task) for part in (plain, section))
    assert words_of(one) == words_of(other)
    assert one.fingerprint == {**other.fingerprint, "source": plain.source}
    assert problems(section, SEQ_LEN, 257, task) == []
    more = megatron(tmp_path) if task == "pretrain" else chats(tmp_path, "more")
    mixture = build_dataset(mixed(tmp_path, folder, more), SEQ_LEN, task)
    assert words_of(one).split()[0] in words_of(mixture)


def test_a_prepared_folder_of_another_task_or_template_is_refused(tmp_path: Path) -> None:
    plain = section_of(tmp_path, source=chats(tmp_path))
    section = plain.replace(source=prepared(tmp_path, plain, "sft"))
    for changed, task, words in (
        (section, "pretrain", "set train.task to sft"),
        (section.replace(train_on="all"), "sft", "data.train_on to assistant"),
        (section.replace(deduplicate=True), "sft", "is prepared tokens: set data.deduplicate to false"),
    ):
        with pytest.raises(DataError, match=words):
            build_dataset(changed, SEQ_LEN, task)
        (problem,) = problems(changed, SEQ_LEN, 257, task)
        assert words in problem


@pytest.mark.parametrize("write", [megatron, mds])
def test_stored_tokens_are_packed_whole_and_are_no_conversations(tmp_path: Path, write: Callable[[Path], str]) -> None:
    section = section_of(tmp_path, source=write(tmp_path), text_key="tokens")
    dataset = build_dataset(section, SEQ_LEN)
    assert problems(section, SEQ_LEN, 257) == []
    assert words_of(dataset).count(WORDS[1][1:]) == 8  # the first token of a document is never a target
    for changed, task, words in (
        (section, "sft", "is stored tokens, which do not say what the assistant wrote"),
        (section.replace(deduplicate=True), "pretrain", "is stored tokens: set data.deduplicate to false"),
    ):
        with pytest.raises(DataError, match=words):
            build_dataset(changed, SEQ_LEN, task)
        (problem,) = problems(changed, SEQ_LEN, 257, task)
        assert words in problem


def test_stored_tokens_without_ends_cannot_be_packed(tmp_path: Path) -> None:
    section = section_of(tmp_path, source=megatron(tmp_path, with_ends=False), mask_documents=False)
    words = 'data.packing = "whole" separates documents at token 256'
    with pytest.raises(DataError, match=words):
        build_dataset(section, SEQ_LEN)
    (problem,) = problems(section, SEQ_LEN, 257)
    assert words in problem
    build_dataset(section.replace(packing="split"), SEQ_LEN)


@pytest.mark.parametrize(
    ("data", "task", "what"),
    [
        ({"source": "my:Data"}, "sft", "makes samples of its own"),
        ({"source": "my:Data", "packing": "whole"}, "pretrain", "packs text"),
        ({"source": "my:Data", "deduplicate": True}, "pretrain", "compares documents"),
        ({"source": "my:Data", "on_bad_document": "skip"}, "pretrain", "leaves out documents"),
        ({"mixture": [{"source": "my:Data"}]}, "pretrain", "which cannot be mixed"),
    ],
    ids=str,
)
def test_samples_of_a_users_own_have_no_documents(data: dict[str, Any], task: Task, what: str) -> None:
    assert any(what in problem for problem in Job.from_dict({"data": data, "train": {"task": task}}).problems())


def kinds(folder: Path) -> list[tuple[DataSection, Task]]:
    """Return a job's data of each kind of numbered samples."""
    chat = section_of(folder, source=chats(folder))
    return [
        (mixed(folder, texts(folder), megatron(folder), packing="split"), "pretrain"),
        (section_of(folder, source=prepared(folder, chat, "sft")), "sft"),
        (mixed(folder, chat.source, chats(folder, "others")), "sft"),
    ]


@pytest.mark.parametrize("kind", range(3))
def test_worker_processes_read_the_same_batches(tmp_path: Path, kind: int) -> None:
    section, task = kinds(tmp_path)[kind]
    batches = []
    for num_workers in (0, 1):
        job = job_of(section.replace(num_workers=num_workers), task)
        loader = open_loader(build_dataset(job.data, SEQ_LEN, task), Share(4, 2, 0, 1), job)
        found = [*loader.microbatches(0), *loader.microbatches(5)]
        for index in range(loader.num_validation_batches):
            found += loader.validation_microbatches(index)
        loader.close()
        batches.append([(one.inputs.tolist(), one.targets.tolist(), str(one.documents)) for one in found])
    assert batches[0] == batches[1]


def test_verbs_on_a_mixture(tmp_path: Path) -> None:
    section = mixed(tmp_path, texts(tmp_path), {"source": megatron(tmp_path), "weight": 3})
    job = resolved(section, steps=6)
    assert len(mw.datasets.prepare(job).sources) == 1
    with pytest.raises(UnsupportedError, match=r"--out .* holds one source, and data.mixture has 2"):
        mw.datasets.prepare(job, out=tmp_path / "out")
    found = mw.datasets.stats(job)
    assert (found.source, len(found.sources)) == ("mixture of s0, s1", 2)
    assert [one.num_documents for one in found.sources] == [20, 40]
    sizes = [
        s.num_training_samples for s in (build_dataset(section.replace(mixture=[t]), SEQ_LEN) for t in section.mixture)
    ]
    assert [one.epochs for one in found.sources] == [
        pytest.approx(n / size) for n, size in zip((6, 18), sizes, strict=True)
    ]
    assert {place for one in mw.datasets.preview(job, count=4).samples for place in one.places} == {"s0", "s1"}
    assert mw.datasets.verify(job).is_valid
    Path(f"{section.mixture[1].source}.bin").write_bytes(b"")
    (tmp_path / "texts.jsonl").write_text('{"text": 1}\n{"text": "good"}\n')
    broken = mw.datasets.verify(job)
    assert [Path(one.where).name for one in broken.problems] == ["texts.jsonl", "tokensTrue"]


@pytest.mark.parametrize("write", [megatron, mds])
def test_verbs_on_stored_tokens(tmp_path: Path, write: Callable[[Path], str]) -> None:
    job = resolved(section_of(tmp_path, source=write(tmp_path), text_key="tokens", packing="split"))
    with pytest.raises(UnsupportedError, match="nothing can be prepared"):
        mw.datasets.prepare(job)
    (one,) = mw.datasets.stats(job).sources
    assert (one.num_documents, one.tokenize_bytes_per_s) == (40, None)
    assert one.num_tokens == sum(len(word) + 1 for word in WORDS) * 8
    assert WORDS[1] in "".join(segment.text for segment in mw.datasets.preview(job, sample=0).samples[0].segments)
    found = mw.datasets.verify(job)
    assert (found.is_valid, found.num_documents) == (True, 40)
    assert found.num_samples > 0


def test_a_preview_of_conversations_shows_what_is_learned(tmp_path: Path) -> None:
    job = resolved(section_of(tmp_path, source=chats(tmp_path)), "sft")
    found = mw.datasets.preview(job, sample=0, count=1).samples[0]
    learned = "".join(segment.text for segment in found.segments if segment.is_target)
    context = "".join(segment.text for segment in found.segments if not segment.is_target)
    assert "of chats" in learned
    assert "Say it" not in learned
    assert "user:\nSay it" in context
    assert "\0" not in learned + context
    (one,) = mw.datasets.stats(job).sources
    assert sum(length.num_documents for length in one.lengths) == one.num_documents == len(WORDS)


def test_verify_names_broken_conversations(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", conversation("one"), "{", {"text": "no"})
    found = mw.datasets.verify(resolved(section_of(tmp_path, source=source), "sft"))
    assert [one.reason.split(" ")[0].rpartition("/")[2] for one in found.problems] == ["a.jsonl:2", "a.jsonl:3"]
    assert found.num_documents == 1


def test_verbs_on_a_stream_say_what_cannot_be_done(tmp_path: Path) -> None:
    plain = {"packing": "split", "mask_documents": False}
    job = resolved(section_of(tmp_path, source="sample_sources:Counting", **plain))
    assert "of an iterable" in mw.datasets.stats(job).table()
    with pytest.raises(ConfigError, match="is an iterable, without numbered samples to show"):
        mw.datasets.preview(job)
    with pytest.raises(UnsupportedError, match="read twice"):
        mw.datasets.verify(job)
    with pytest.raises(UnsupportedError, match="nothing can be prepared"):
        mw.datasets.prepare(job)
    validated = resolved(section_of(tmp_path, source="sample_sources:Validated", **plain))
    assert mw.datasets.verify(validated).num_samples == 12
