"""Conversations become the ids that transformers makes of them, and exactly what the assistant writes is a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat_tokenizer import CHATML, FORGETS, LLAMA_2, UNMARKED, write_chat_tokenizer
from meshwright.data.conversations.chat_template import load_chat_template
from meshwright.data.conversations.conversation_encoder import ConversationEncoder
from meshwright.data.conversations.records import as_conversation
from meshwright.data.packing.whole_documents import TARGET_BIT
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

Messages = list[dict[str, Any]]

_TEXTS = st.text(alphabet=st.sampled_from("a b\n'é😀\t?hello"), min_size=1, max_size=12)


def turns(*contents: str, system: str | None = None) -> Messages:
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *said] if system else said


def encoder_of(section: DataSection) -> ConversationEncoder:
    tokenizer = load_tokenizer(section.tokenizer)
    return ConversationEncoder(section, tokenizer, load_chat_template(section, tokenizer))


def learned(section: DataSection, record: dict[str, Any]) -> str:
    """Return the text of the targets of a record."""
    (ids,) = encoder_of(section).encode([as_conversation(record, "here", "messages")])
    targets = [int(token & ~TARGET_BIT) for token in ids if token & TARGET_BIT]
    tokenizer = load_tokenizer(section.tokenizer)
    end = tokenizer.end_of_text
    return "".join("$" if token == end else tokenizer.decode([token]) for token in targets)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def their_tokens(theirs: Any, messages: Messages, **how: Any) -> tuple[list[int], list[int]]:
    found = theirs.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **how
    )
    return found["input_ids"], found["assistant_masks"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(contents=st.lists(_TEXTS, min_size=2, max_size=6), system=st.none() | _TEXTS)
def test_ids_and_targets_are_those_of_transformers(
    folder: Path, theirs: Any, contents: list[str], system: str | None
) -> None:
    messages = turns(*contents[: len(contents) // 2 * 2], system=system)
    expected_ids, mask = their_tokens(theirs, messages)
    for template in ("chat_template.jinja", "unmarked.jinja"):
        (folder / "unmarked.jinja").write_text(UNMARKED)
        section = DataSection(tokenizer=str(folder), chat_template=str(folder / template))
        (ids,) = encoder_of(section).encode([{"messages": messages, "num_given": 0}])
        assert (ids & ~TARGET_BIT).tolist() == expected_ids
        assert (ids & TARGET_BIT != 0).tolist() == [bool(one) for one in mask], template


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", "one$three$"),
        ("last", "three$"),
        ("all", "user:\n0\nassistant:\none$\nuser:\n2\nassistant:\nthree$\n"),
    ],
)
def test_a_job_says_which_messages_are_learned(train_on: Any, expected: str) -> None:
    section = DataSection(train_on=train_on)
    assert learned(section, {"messages": turns("0", "one", "2", "three")}) == expected


def test_templates_that_strip_and_have_no_generation_prompt(tmp_path: Path) -> None:
    section = DataSection(tokenizer=str(write_chat_tokenizer(tmp_path, LLAMA_2)))
    assert learned(section, {"messages": turns(" hi ", "  hello ", "a", "b\n")}) == " hello $ b $"


def test_a_template_that_rewrites_earlier_turns_is_named(tmp_path: Path) -> None:
    section = DataSection(tokenizer=str(write_chat_tokenizer(tmp_path, FORGETS)))
    record = {"messages": turns("0", "hm</think>one", "2", "hm</think>three")}
    message = r"chat template .*jinja renders the first 2 messages .* differently alone .*{% generation %}.*train_on"
    with pytest.raises(DataError, match=message):
        learned(section, record)
    # What it forgets is before the last turn.
    assert learned(section.replace(train_on="last"), record) == "hm</think>three$\n"


def test_a_template_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path, template=None)
    section, record = DataSection(tokenizer=str(folder)), {"messages": turns("0", "one")}
    with pytest.raises(DataError, match=r"has no chat template .* set data.chat_template"):
        learned(section, record)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    for template in (CHATML, named):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        assert learned(section, record) == "one$\n"
    assert learned(section.replace(chat_template="plain"), record) == "one$"


def test_prompts_and_completions() -> None:
    section = DataSection()
    assert learned(section, {"prompt": "1, 2, ", "completion": "3"}) == "3$"
    given = {"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]}
    assert learned(section, given) == "d$"


def test_null_is_no_field_of_a_record_but_one_of_a_message() -> None:
    messages = [{**one, "tool_calls": None} for one in turns("a", "b")]
    record = {"messages": messages, "prompt": None}
    assert as_conversation(record, "here", "messages") == {"messages": messages, "num_given": 0}


def test_a_template_is_data_and_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "evil.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match="unsafe"):
        learned(DataSection(chat_template=str(tmp_path / "evil.jinja")), {"messages": turns("a", "b")})


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "a"}, "line has no field 'messages', nor both 'prompt' and 'completion' .*'text'.*data.messages_key"),
        ({"messages": None}, "line: field 'messages' is null: correct or remove the record"),
        ({"messages": None, "prompt": None, "completion": "a"}, "field 'messages' is null"),
        ({"prompt": "a", "completion": 3}, "line: field 'prompt' is a text and field 'completion' is 3, but both are"),
        ({"prompt": None, "completion": "a"}, "field 'prompt' is null and field 'completion' is a text"),
        (
            {"messages": None, "prompt": "a", "completion": []},
            "field 'prompt' is a text and field 'completion' is a list",
        ),
        ({"messages": []}, r"line: field 'messages' is \[\], not a list of messages"),
        ({"messages": ["a"]}, "'messages' has \"a\" as message 1, not an object"),
        ({"messages": [{"content": "a"}]}, "has a message 1 without a role"),
        ({"messages": [{"role": "user", "content": 5}]}, "has a message 1 without a content of text"),
        ({"messages": turns("a\ufdd0", "b")}, r"holds the noncharacter U\+FDD0"),
        ({"messages": turns("a\ud800", "b")}, "half of a surrogate pair"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_named(record: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        as_conversation(record, "line", "messages")
