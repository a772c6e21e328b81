"""Everything that is wrong with conversations is reported before a process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import LLAMA_2, write_chat_tokenizer
from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.examine.target_notes import target_notes
from meshwright.errors import DataError
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SILENT = {"messages": [{"role": "user", "content": "Hi"}]}


def section_of(folder: Path, *records: Any, **changes: Any) -> DataSection:
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    (folder / "chat.jsonl").write_text("".join(f"{line}\n" for line in lines))
    own = {"source": str(folder / "chat.jsonl"), "cache_dir": str(folder / "cache"), "validation_fraction": 0.0}
    return DataSection(packing="whole", mask_documents=True, **(own | changes))


def test_all_wrong_records_are_named(tmp_path: Path) -> None:
    section = section_of(tmp_path, {"text": "a"}, GOOD, {"messages": [{"role": "user"}]}, "{")
    found = problems(section, 64, None, "sft")
    assert [one.split(" ")[0].rpartition(":")[2] for one in found[:1]] == ["1"]
    assert len(found) == 3
    for line, one in zip((1, 3, 4), found, strict=True):
        assert one.startswith(f"{section.source}:{line}")


def test_what_a_template_refuses_is_named_in_its_words(tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer", LLAMA_2)
    system = {"messages": [{"role": "system", "content": "Be brief."}, *GOOD["messages"]]}
    (problem,) = problems(section_of(tmp_path, GOOD, system, tokenizer=str(folder)), 64, None, "sft")
    assert problem.startswith(f"{tmp_path}/chat.jsonl:2: the chat template")
    assert "does not take these messages: Conversation roles must alternate" in problem


def test_the_plain_template_writes_no_message_without_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    section = section_of(tmp_path, GOOD, {"messages": [GOOD["messages"][0], call]})
    (problem,) = problems(section, 64, None, "sft")
    assert "chat.jsonl:2: the chat template plain writes contents alone, and message 2 has none" in problem
    assert "set data.chat_template to a Jinja file that writes them" in problem


def test_too_long_and_too_few(tmp_path: Path) -> None:
    (problem,) = problems(section_of(tmp_path, GOOD), 8, None, "sft")
    assert "1 document of 1" in problem
    assert "set train.seq_len to 26 or more, or data.too_long to cut or skip" in problem
    # The first eight tokens hold no word of the assistant.
    cut = section_of(tmp_path, GOOD, too_long="cut")
    (problem,) = problems(cut, 8, None, "sft")
    assert "holds 0 documents to learn from but needs 1; 1 without a target is left out" in problem
    assert problem.endswith(
        "'assistant', spelled so within train.seq_len: correct those, or add some, or lengthen train.seq_len"
    )
    with pytest.raises(DataError, match="holds 0 documents"):
        build_dataset(cut, 8, "sft")


def test_conversations_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    section = section_of(tmp_path, GOOD, SILENT, GOOD)
    assert problems(section, 64, None, "sft") == []
    assert [*build_dataset(section, 64, "sft").notes] == [
        "2 documents in 1 row, 81.2% full (1 left out without a target)"
    ]


def test_check_notes_records_without_a_target(tmp_path: Path) -> None:
    typo = {"messages": [{"role": "user", "content": "Hi"}, {"role": "Assistant", "content": "Hello"}]}
    section = section_of(tmp_path, GOOD, SILENT, typo, GOOD, SILENT, SILENT)
    assert target_notes(section, "pretrain") == []
    assert target_notes(section_of(tmp_path, GOOD), "sft") == []
    section = section_of(tmp_path, GOOD, SILENT, typo, GOOD, SILENT, SILENT)
    (note,) = target_notes(section, "sft")
    file = section.source
    assert f"4 of 6 records read of data.source = {file!r} have no target and are left out" in note
    assert f"({file}:2, {file}:3, {file}:5, ...): targets are what messages with the role 'assistant', spelled" in note
    (note,) = target_notes(section_of(tmp_path, GOOD, typo), "sft")
    assert f"1 of 2 records read of data.source = {file!r} has no target and is left out ({file}:2)" in note


def test_check_notes_pairs_without_a_target(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "A"}], [{"role": "assistant", "content": "B"}]
    pairs = [
        {"prompt": said[0], "chosen": said[1], "rejected": other}
        for other in (said[0], [said[1][0] | {"content": "C"}])
    ]
    (note,) = target_notes(section_of(tmp_path, *pairs), "dpo")
    assert "1 of 2 records read" in note
    assert "chat.jsonl:1)" in note


def test_no_longer_sequence_gives_a_target(tmp_path: Path) -> None:
    section = section_of(tmp_path, SILENT, SILENT)
    (problem,) = problems(section, 64, None, "sft")
    assert "2 without a target are left out: a conversation needs a message with the role 'assistant'" in problem
    assert "seq_len" not in problem
    with pytest.raises(DataError, match="2 without a target are left out"):
        build_dataset(section, 64, "sft")


def test_check_says_that_it_stops_at_five(tmp_path: Path) -> None:
    found = problems(section_of(tmp_path, *[{"text": "a"}] * 7), 64, None, "sft")
    assert len(found) == 6
    assert "may hold more problems than these 5" in found[-1]
    assert found[-1].endswith("`meshwright data verify JOB` names all")
    assert len(problems(section_of(tmp_path, *[{"text": "a"}] * 4), 64, None, "sft")) == 4


def test_text_holds_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hi")
    for source in ("stdlib", str(tmp_path / "a.txt")):
        (problem,) = problems(DataSection(source=source), 64, None, "sft")
        assert "holds no records" in problem
        assert 'a prompt and a completion, which train.task = "sft" learns from' in problem


def test_records_of_a_parquet_file(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([GOOD, GOOD]), tmp_path / "chat.parquet")
    same = section_of(tmp_path, GOOD, GOOD)
    section = same.replace(source=str(tmp_path / "chat.parquet"))
    assert problems(section, 64, None, "sft") == []
    from_parquet, from_lines = (build_dataset(one, 64, "sft") for one in (section, same))
    assert from_parquet.fingerprint["content_hash"] == from_lines.fingerprint["content_hash"]


@pytest.mark.parametrize(
    ("train", "data", "what", "fixes"),
    [
        ("sft", {}, 'data.packing = "split" cuts conversations apart', 2),
        ("sft", {"packing": "whole"}, "attend to one another with data.mask_documents = false", 2),
        ("sft", {"packing": "none"}, None, 0),
        ("sft", {"source": "my:Data"}, "makes samples of its own", 1),
        ("pretrain", {"packing": "whole", "source": "my:Data"}, "packs text", 1),
        ("pretrain", {"too_long": "cut"}, "keeps no document whole", 2),
        ("pretrain", {"train_on": "all"}, 'data.train_on = "all" does nothing with train.task = "pretrain"', 1),
    ],
    ids=str,
)
def test_rules_between_keys(train: str, data: dict[str, Any], what: str | None, fixes: int) -> None:
    found = Job.from_dict({"train": {"task": train}, "data": data}).problems()
    assert len(found) == (what is not None)
    for problem in found:
        assert what is not None
        assert what in problem
        assert len(problem.fixes) == fixes
