"""TextStream: pieces add up to the text, and none ends in the middle of a character."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.tokenizer import load_tokenizer
from meshwright.inference.generate import TextStream

BYTES = load_tokenizer("bytes")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    stream = TextStream(BYTES)
    pieces = [stream.add(byte) for byte in text.encode()]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.end() == ""


@given(st.lists(st.integers(0, 256)))
def test_bytes_that_are_no_text_are_shown_in_time(ids: list[int]) -> None:
    stream = TextStream(BYTES)
    for count in range(1, len(ids) + 1):
        stream.add(ids[count - 1])
    stream.end()


def test_half_a_character_is_shown_at_the_end() -> None:
    stream = TextStream(BYTES)
    assert [stream.add(byte) for byte in "ä".encode()[:1]] == [""]
    assert stream.end() == "\ufffd"


def test_a_space_before_the_first_word_after_the_prompt_is_kept(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    # As in Llama 2: the decoder drops the space at the start of a text.
    words = library.models.WordLevel({"▁one": 0, "▁two": 1, "</s>": 2, "[UNK]": 3}, unk_token="[UNK]")
    theirs = library.Tokenizer(words)
    theirs.pre_tokenizer, theirs.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    stream = TextStream(tokenizer, [int(token) for token in tokenizer.encode("one")])
    assert [stream.add(1), stream.add(0), stream.end()] == [" two", " one", ""]
