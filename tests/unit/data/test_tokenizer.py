import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.tokenizer import ByteTokenizer, load_tokenizer
from meshwright.errors import DataError, UnsupportedError

TRICKY = [
    "plain",
    " leading and trailing ",
    "tabs\tand\nnewlines\r\n\n  double  spaces",
    "naïve — “quotes” … ﬁ",
    "日本語テキスト",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301 is not é",
    "\x00\x01\x7f\u0080\u00ad\ufeff\uffff\U0010ffff",
    "Ġ Ċ ġ Ā",
    "<|end_of_text| >",
    "it's we'll 123456 ",
    "",
]

EXPORTED = tokenizers.Tokenizer.from_str(ByteTokenizer().to_tokenizer_json())


def make_json(folder: Path, name: str = "tokenizer.json", special: str | None = "<|endoftext|>") -> Path:
    """A small BPE trained here, as a user's would be."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[special] if special else [],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the dog and the theory " * 20], trainer)
    path = folder / name
    tokenizer.save(str(path))
    return path


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_decode_leaves_ends_out_and_shows_what_is_broken() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.decode([104, 105, 256]) == "hi"
    assert tokenizer.decode([104, 0xC3, 105]) == "h\ufffdi"
    assert tokenizer.decode(np.array([104, 270, 105])) == "h\ufffdi"
    assert tokenizer.decode([]) == ""


@given(st.text())
def test_exported_bytes_encode_alike_in_tokenizers(text: str) -> None:
    ids = load_tokenizer("bytes").encode(text).tolist()
    if "<|end_of_text|>" not in text:
        assert EXPORTED.encode(text).ids == ids
    assert EXPORTED.decode(ids) == text


@pytest.mark.parametrize("text", TRICKY)
def test_exported_bytes_encode_tricky_text_alike(text: str) -> None:
    ids = ByteTokenizer().encode(text).tolist()
    assert EXPORTED.encode(text).ids == ids
    assert EXPORTED.decode(ids, skip_special_tokens=False) == text


def test_exported_bytes_have_one_special_token() -> None:
    assert EXPORTED.get_vocab_size() == 257
    assert EXPORTED.token_to_id("<|end_of_text|>") == 256
    assert EXPORTED.decode([104, 256], skip_special_tokens=True) == "h"
    assert EXPORTED.decode([104, 256], skip_special_tokens=False) == "h<|end_of_text|>"
    # The one text that differs: Hugging Face reads the names of special tokens in any text.
    assert EXPORTED.encode("a<|end_of_text|>").ids == [97, 256]


def test_exported_bytes_load_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_tokenizer_json(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(loaded), loaded.eos_token_id) == (257, 256)
    for text in TRICKY:
        ids = ByteTokenizer().encode(text).tolist()
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids, clean_up_tokenization_spaces=False) == text


def test_exported_bytes_load_here_again(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(ByteTokenizer().to_tokenizer_json(), encoding="utf-8")
    loaded = load_tokenizer(str(path))
    assert (loaded.vocab_size, loaded.end_of_text, loaded.end_of_text_token) == (257, 256, "<|end_of_text|>")
    for text in TRICKY:
        assert loaded.encode(text).tolist() == ByteTokenizer().encode(text).tolist()


def test_a_tokenizer_json_encodes_as_its_library_does(tmp_path: Path) -> None:
    path = make_json(tmp_path)
    reference = tokenizers.Tokenizer.from_file(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == reference.get_vocab_size()
    assert tokenizer.end_of_text == reference.token_to_id("<|endoftext|>")
    for text, ids in zip(TRICKY, tokenizer.encode_batch(TRICKY), strict=True):
        assert ids.tolist() == tokenizer.encode(text).tolist() == reference.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.end_of_text, 10**6]) == ""
    assert tokenizer.to_tokenizer_json() == path.read_text()


def test_a_folder_stands_for_the_file_in_it(tmp_path: Path) -> None:
    path = make_json(tmp_path)
    assert load_tokenizer(str(tmp_path)).identity == load_tokenizer(str(path)).identity


def test_padding_and_truncation_of_the_file_are_not_applied(tmp_path: Path) -> None:
    path = make_json(tmp_path)
    cutting = tokenizers.Tokenizer.from_file(str(path))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=4)
    cutting.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert len(tokenizer.encode("x")) == 1
    assert len(tokenizer.encode("0123456789")) == 10


def test_vocab_size_covers_ids_with_gaps(tmp_path: Path) -> None:
    model = tokenizers.models.WordLevel({"a": 0, "</s>": 7}, unk_token="a")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (8, 7)


@pytest.mark.parametrize("form", ["zebra", {"content": "zebra", "__type": "AddedToken"}])
def test_the_config_beside_it_names_the_end_of_text(tmp_path: Path, form: Any) -> None:
    path = make_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": form}))
    with pytest.raises(DataError, match=r"eos_token = 'zebra' is not in .*tokenizer.json"):
        load_tokenizer(str(path))
    the = json.loads(json.dumps(form).replace("zebra", "the"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": the}))
    assert load_tokenizer(str(path)).end_of_text_token == "the"
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not a JSON object"):
        load_tokenizer(str(path))


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no token to end a document with .*<\|endoftext\|>.*eos_token"):
        load_tokenizer(str(make_json(tmp_path, special=None)))


def test_bad_files_are_refused_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing.json' does not exist: set it to bytes, or"):
        load_tokenizer(str(tmp_path / "missing.json"))
    with pytest.raises(DataError, match=r"tokenizer.json' does not exist"):
        load_tokenizer(str(tmp_path))
    bad = tmp_path / "bad.json"
    for content in (b"", b"{", b'{"model": 1}', b"[]"):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=r"bad.json' is no valid tokenizer.json \("):
            load_tokenizer(str(bad))
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"bad.json' is no text"):
        load_tokenizer(str(bad))
    with pytest.raises(DataError, match=r"cannot be read \(Not a directory\)"):
        load_tokenizer(str(bad / "tokenizer.json"))


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_json(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[hf\]'"):
        load_tokenizer(str(path))
    assert load_tokenizer("bytes").vocab_size == 257
