"""Pairs of answers: what records hold, what is learned of them, and that no pair is ever split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.cache.prepared_folder import write_prepared
from meshwright.data.corpus import map_corpora
from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.packing.pair_dataset import NO_PAIR, PairDataset
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

IGNORED, END = -100, 256


def section(folder: Path, records: list[dict[str, Any]], **options: Any) -> DataSection:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    chosen = {"packing": "whole", "mask_documents": True, "validation_fraction": 0.0, **options}
    return DataSection(source=str(file), cache_dir=str(folder / "cache"), **chosen)


def dataset_of(data: DataSection, seq_len: int = 64) -> PairDataset:
    found = build_dataset(data, seq_len, "dpo")
    assert isinstance(found, PairDataset)
    return found


def answers(dataset: PairDataset, row: int = 0) -> list[tuple[str, str]]:
    """Return prompt with answer, and the learned part of it, of each document of a row."""
    inputs, targets, documents, pairs = dataset.read(row)
    found = []
    for number in range(2 * int((pairs != NO_PAIR).sum())):
        here = documents == number
        whole = inputs[here].tolist()
        learned = [int(token) for token in targets[here] if token != IGNORED]
        assert learned[-1] == END
        # A template may write a line break after the end.
        whole = whole[: whole.index(END)] if END in whole else whole
        found.append((bytes(whole).decode(), bytes(learned[:-1]).decode()))
    return found


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


QUESTION = turn("user", "Q")
TEXTS = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
SHARED = {"chosen": [QUESTION, turn("assistant", "yes")], "rejected": [QUESTION, turn("assistant", "no")]}
EXPLICIT = {"prompt": [QUESTION], "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (TEXTS, [("1+1=2", "2"), ("1+1=3", "3")]),
        # Nothing comes before the first token of a document, so that it is learned nowhere.
        ({"chosen": "ab", "rejected": "ac"}, [("ab", "b"), ("ac", "c")]),
        (SHARED, [("user:\nQ\nassistant:\nyes", "yes"), ("user:\nQ\nassistant:\nno", "no")]),
        (EXPLICIT, [("user:\nQ\nassistant:\nyes", "yes"), ("user:\nQ\nassistant:\nno", "no")]),
    ],
)
def test_targets_are_the_answers(record: dict[str, Any], expected: list[tuple[str, str]], tmp_path: Path) -> None:
    assert answers(dataset_of(section(tmp_path, [record]))) == expected


def test_an_earlier_answer_that_both_begin_with_is_no_target(tmp_path: Path) -> None:
    before = [QUESTION, turn("assistant", "A"), turn("user", "R")]
    record = {"chosen": [*before, turn("assistant", "B")], "rejected": [*before, turn("assistant", "C")]}
    assert [learned for _, learned in answers(dataset_of(section(tmp_path, [record]), 128))] == ["B", "C"]


def test_keys_of_a_record_have_other_names(tmp_path: Path) -> None:
    data = section(tmp_path, [{"good": "ab", "bad": "ac"}], chosen_key="good", rejected_key="bad")
    assert answers(dataset_of(data)) == [("ab", "b"), ("ac", "c")]
    # The same file under the opposite keys holds the opposite pairs, whatever the cache holds.
    swapped = data.replace(chosen_key="bad", rejected_key="good")
    assert answers(dataset_of(swapped)) == [("ac", "c"), ("ab", "b")]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"chosen": "a"}, "lacks 'rejected' (its fields: 'chosen')"),
        ({"chosen": "a", "rejected": None}, "field 'rejected' is null, neither text nor a list of messages"),
        ({"chosen": 1, "rejected": 2}, "field 'chosen' is 1, neither text nor a list of messages"),
        ({"prompt": 1, "chosen": "a", "rejected": "b"}, "field 'prompt' is 1, neither"),
        ({"chosen": "a", "rejected": ""}, "field 'rejected' is empty"),
        ({"chosen": [], "rejected": [QUESTION]}, "field 'chosen' is empty"),
        (
            {"prompt": [QUESTION], "chosen": turn("assistant", "a"), "rejected": []},
            "'chosen' is one object, not a list",
        ),
        (
            {"prompt": "Q", "chosen": [turn("assistant", "a")], "rejected": [turn("assistant", "b")]},
            "field 'prompt' is a text and field 'chosen' is a list, but all are texts or all are lists of messages",
        ),
        (
            {"prompt": "Q", "chosen": "a", "rejected": [turn("assistant", "b")]},
            "field 'prompt' is a text and field 'rejected' is a list",
        ),
        ({"prompt": [QUESTION], "chosen": "a", "rejected": "b"}, "'prompt' is a list and field 'chosen' is a text"),
        (
            {"chosen": [QUESTION], "rejected": [QUESTION, turn("assistant", "b")]},
            "field 'chosen' holds no answer of its own: field 'rejected' begins with all of its messages",
        ),
        (
            {"chosen": [QUESTION, turn("assistant", "b")], "rejected": [QUESTION]},
            "'rejected' holds no answer of its own",
        ),
        ({"chosen": "a", "rejected": "a"}, "fields 'chosen' and 'rejected' are equal"),
        ({"prompt": "Q", "chosen": "a", "rejected": "a"}, "are equal, so that neither answer is the better one"),
        ({"chosen": [QUESTION], "rejected": [QUESTION]}, "are equal"),
        (EXPLICIT | {"rejected": [turn("assistant", "yes") | {"name": None}]}, "makes the same text of both answers"),
        (EXPLICIT | {"rejected": [turn("assistant", "yes") | {"name": "a"}]}, "makes the same text of both answers"),
        ({"chosen": [{"role": "assistant"}], "rejected": [turn("assistant", "a")]}, "without a content"),
    ],
)
def test_broken_records_are_named(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    data = section(tmp_path, [TEXTS, record])
    (problem,) = problems(data, 64, 257, "dpo")
    assert words in problem
    assert "pairs.jsonl:2" in problem
    with pytest.raises(DataError, match=r"pairs\.jsonl:2"):
        build_dataset(data, 64, "dpo")
    kept = dataset_of(data.replace(on_bad_document="skip"))
    assert kept.num_pairs == 1


def test_pairs_that_fit_no_row_stop_the_run_or_are_left_out(tmp_path: Path) -> None:
    data = section(tmp_path, [TEXTS, {"prompt": "a" * 40, "chosen": "b", "rejected": "c"}])
    (problem,) = problems(data, 64, 257, "dpo")
    assert "1 pair of 2" in problem
    assert "82 tokens of the longest: set train.seq_len to 82 or more" in problem
    with pytest.raises(DataError, match=r"set train\.seq_len to 82"):
        build_dataset(data, 64, "dpo")
    assert problems(data, 82, 257, "dpo") == []
    assert dataset_of(data, 82).num_pairs == 2
    assert dataset_of(data.replace(too_long="skip")).num_pairs == 1


def test_a_prepared_folder_of_another_task_is_refused(tmp_path: Path) -> None:
    data = section(tmp_path, [TEXTS, SHARED])
    (cache,) = map_corpora(data, "dpo", lambda corpus: corpus.cache())
    write_prepared(tmp_path / "ready", cache, load_tokenizer("bytes"))
    prepared = data.replace(source=str(tmp_path / "ready"), tokenizer="bytes")
    assert problems(prepared, 64, 257, "dpo") == []
    assert answers(dataset_of(prepared)) == answers(dataset_of(data))
    (problem,) = problems(prepared, 64, 257, "sft")
    assert 'prepared from pairs of answers, not for train.task = "sft": set train.task to dpo' in problem


PAIR = st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, 12))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(PAIR, min_size=2, max_size=20), packing=st.sampled_from(["whole", "none"]))
def test_every_pair_is_whole_in_one_row(
    lengths: list[tuple[int, int, int]], packing: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    records = [
        {"prompt": "p" * asked, "chosen": f"{'c' * good}", "rejected": f"{'r' * bad}"} for asked, good, bad in lengths
    ]
    dataset = dataset_of(section(folder, records, packing=packing, validation_fraction=0.3), 72)
    seen = []
    for row in range(dataset.num_samples):
        texts, pairs = answers(dataset, row), dataset.read(row)[3]
        for place, pair in enumerate(pairs[pairs != NO_PAIR]):
            record = records[pair]
            assert texts[2 * place][0] == record["prompt"] + record["chosen"]
            assert texts[2 * place + 1][0] == record["prompt"] + record["rejected"]
            seen.append(int(pair))
    assert sorted(seen) == list(range(len(records)))
    padding = dataset.read(dataset.num_samples)
    assert (padding[1] == IGNORED).all()
    assert not padding[2].any()
    assert (padding[3] == NO_PAIR).all()


def test_pairs_of_a_mixture_are_numbered_over_its_sources(tmp_path: Path) -> None:
    short = [{"prompt": "p", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(7)]
    long = [{"good": "g" * 20 + str(n), "bad": "b" * 25 + str(n)} for n in range(3)]
    tables = []
    for name, records, keys in (("short", short, ("chosen", "rejected")), ("long", long, ("good", "bad"))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        tables.append({"source": str(tmp_path / f"{name}.jsonl"), "chosen_key": keys[0], "rejected_key": keys[1]})
    data = DataSection.from_dict(
        {
            **{"mixture": tables, "cache_dir": str(tmp_path / "cache")},
            **{"packing": "whole", "mask_documents": True, "validation_fraction": 0.3},
        }
    )
    dataset = build_dataset(data, 64, "dpo")
    assert (dataset.num_pairs, dataset.num_validation_samples > 1) == (10, True)
    expected = [f"p{one['chosen']}" for one in short] + [one["good"] for one in long]
    seen = []
    for row in range(dataset.num_samples):
        inputs, _, documents, pairs = dataset.read(row)
        assert len(pairs) == dataset.pairs_in_row
        for place, pair in enumerate(pairs[pairs != NO_PAIR]):
            here = documents == 2 * place
            assert bytes(inputs[here].tolist()).decode() == expected[pair]
            seen.append(int(pair))
    assert sorted(seen) == list(range(10))
    assert (dataset.read(dataset.num_samples)[3] == NO_PAIR).all()


def test_one_file_under_opposite_keys_is_two_sources(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"a": "xy", "b": "xz"}\n' * 2)
    source, names = str(tmp_path / "pairs.jsonl"), (("a", "b"), ("b", "a"))
    tables = [{"source": source, "name": one, "chosen_key": one, "rejected_key": other} for one, other in names]
    given = {"packing": "none", "mask_documents": True, "validation_fraction": 0.0, "cache_dir": str(tmp_path / "c")}
    dataset = build_dataset(DataSection.from_dict({"mixture": tables, **given}), 16, "dpo")
    found = []
    for row in range(dataset.num_samples):
        _, targets, documents, _ = dataset.read(row)
        found.append(chr(targets[(documents == 0) & (targets != IGNORED)][0]))
    assert found == ["y", "y", "z", "z"]
