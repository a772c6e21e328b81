"""Tools and their calls are printed by chat templates as transformers prints them, whatever file they are read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import transformers

from chat_tokenizer import write_chat_tokenizer
from meshwright.data.encoding import Encoding
from meshwright.data.packing.whole_documents import TARGET_BIT
from meshwright.spec.job.sections import DataSection

_TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n{{ tools | tojson(indent=2) }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}"
    "{{ call.function.arguments | tojson(indent=4) }}"
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
_PARAMETERS = {
    "type": "object",
    "required": ["stadt", "days"],
    "properties": {"stadt": {"type": "string"}, "days": {"a": 1}},
}
_WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "für <b> & 天气", "parameters": _PARAMETERS},
}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"stadt": "Zürich 🙂", "days": 2}}}


def conversation(tool: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "there"},
    ]
    return {"tools": [tool], "messages": turns}


def section_of(source: Path, folder: Path) -> DataSection:
    tokenizer = write_chat_tokenizer(folder / "tokenizer", _TOOLS_TEMPLATE)
    return DataSection(source=str(source), tokenizer=str(tokenizer), train_on="all")


def token_ids(section: DataSection, task: Any = "sft") -> list[int]:
    encoding = Encoding(section, task)
    texts = [piece.utf8.decode() for piece in encoding.reader(section)]
    return [int(token & ~TARGET_BIT) for ids in encoding.encoder.encode_batch(texts) for token in ids]


def expected_ids(section: DataSection, record: dict[str, Any]) -> list[int]:
    theirs = transformers.AutoTokenizer.from_pretrained(section.tokenizer)
    found = theirs.apply_chat_template(record["messages"], tools=record["tools"], tokenize=True, return_dict=True)
    return list(found["input_ids"])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_keys_are_in_the_order_of_the_record(tmp_path: Path, suffix: str) -> None:
    record, source = conversation(_WEATHER, _CALL), tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), source)
    else:
        source.write_text(json.dumps(record))
    section = section_of(source, tmp_path)
    assert token_ids(section) == expected_ids(section, record)


def test_other_order_of_keys_is_another_conversation(tmp_path: Path) -> None:
    swapped = {**_CALL["function"], "arguments": {"days": 2, "stadt": "Zürich 🙂"}}  # type: ignore[dict-item]
    records = [conversation(_WEATHER, call) for call in (_CALL, {**_CALL, "function": swapped})]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    section = section_of(tmp_path / "a.jsonl", tmp_path)
    assert token_ids(section) == [token for record in records for token in expected_ids(section, record)]


def test_null_in_json_is_printed_and_in_a_table_is_of_another_row(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None, "enum": ["a", None]}}}
    record = conversation(tool, {"type": "function", "function": {"name": "f", "arguments": {"b": None, "a": 1}}})
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    section = section_of(tmp_path / "a.jsonl", tmp_path)
    assert token_ids(section) == expected_ids(section, record)
    rows = [
        conversation({"type": "function"}, {"type": "function", "function": {"name": "f", "arguments": {name: 1}}})
        for name in ("b", "a")
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    section = section.replace(source=str(tmp_path / "b.parquet"))
    assert token_ids(section) == [token for row in rows for token in expected_ids(section, row)]


def test_pairs_keep_the_order_too(tmp_path: Path) -> None:
    record = conversation(_WEATHER, _CALL)
    *prompt, last = record["messages"]
    answers = {"chosen": [last], "rejected": [{"role": "assistant", "content": "name"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"tools": record["tools"], "prompt": prompt, **answers}))
    section = section_of(tmp_path / "a.jsonl", tmp_path)
    ids = expected_ids(section, record)
    assert token_ids(section, "dpo")[: len(ids)] == ids
