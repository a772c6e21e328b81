"""Tokenizers: bytes, or any Hugging Face tokenizer.json."""

import hashlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.data.cache.token_file import Tokens
from meshwright.errors import DataError
from meshwright.extras import import_extra
from meshwright.spec.model.hf.hub_cache import hub_advice, local_path

BYTES = "bytes"
END_OF_TEXT = "<|end_of_text|>"

_KNOWN_ENDS_OF_TEXT = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Names of the token between documents in published tokenizers, tried in this order."""


Places = npt.NDArray[np.int64]
"""Places of characters in a text."""


class Tokenizer(Protocol):
    """Encoder of text to token ids and back."""

    vocab_size: int
    """One more than the largest id."""
    end_of_text: int
    """The id that ends every document."""
    end_of_text_token: str
    """The name of that id in tokenizer.json."""
    identity: str
    """Equal for tokenizers with equal encodings; saved in checkpoints."""
    version: str
    """Version of the encoding code; part of the cache key."""

    def encode(self, text: str) -> Tokens:
        """Return the ids of `text`, without end of text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text, faster than one by one."""
        ...

    def encode_located(self, texts: Sequence[str]) -> list[tuple[Tokens, Places, Places]]:
        """Return the ids of each text, and where the characters of each id start and end in it.

        The text of end of text becomes its id.
        """
        ...

    def decode(self, ids: Sequence[int] | Tokens, *, special: bool = False) -> str:
        """Return the text of `ids`, with U+FFFD for invalid UTF-8; with the names of special tokens if `special`."""
        ...

    def to_tokenizer_json(self) -> str:
        """Return an equivalent tokenizer.json for the tokenizers library."""
        ...


class ByteTokenizer:
    """Byte tokenizer: ids 0 to 255 are UTF-8 bytes, 256 is end of text."""

    vocab_size = 257
    end_of_text = 256
    end_of_text_token = END_OF_TEXT
    identity = "bytes"
    version = "1"

    def encode(self, text: str) -> Tokens:
        """Return one uint8 id for each byte of the text's UTF-8."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def encode_located(self, texts: Sequence[str]) -> list[tuple[Tokens, Places, Places]]:
        """Return int64 ids of each text, with end of text for its name, and the characters of each."""
        return [self._located(text) for text in texts]

    def _located(self, text: str) -> tuple[Tokens, Places, Places]:
        ids, starts, ends, at = [], [], [], 0
        for number, part in enumerate(text.split(END_OF_TEXT)):
            if number:
                ids.append(np.array([self.end_of_text]))
                starts.append(np.array([at]))
                at += len(END_OF_TEXT)
                ends.append(np.array([at]))
            ids.append(self.encode(part).astype(np.int64))
            # UTF-8 has one byte up to U+007F, two up to U+07FF, three up to U+FFFF, else four.
            points = np.frombuffer(part.encode("utf-32-le"), dtype="<u4")
            num_bytes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
            starts.append(np.repeat(np.arange(at, at + len(part)), num_bytes))
            ends.append(starts[-1] + 1)
            at += len(part)
        return np.concatenate(ids), np.concatenate(starts), np.concatenate(ends)

    def decode(self, ids: Sequence[int] | Tokens, *, special: bool = False) -> str:
        """Return the text of `ids` without end of text, which has no name here; ids above 256 become U+FFFD."""
        array = np.asarray(ids, dtype=np.int64)
        array = array[array != self.end_of_text]
        # 0xFF is no UTF-8 byte, so each such id decodes to one U+FFFD.
        return np.where((array >= 0) & (array < 256), array, 0xFF).astype(np.uint8).tobytes().decode(errors="replace")

    def to_tokenizer_json(self) -> str:
        """Return a byte-level BPE without merges, whose ids are byte values.

        Equivalent except for the text "<|end_of_text|>", which Hugging Face encodes as id 256.
        """
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        end = {"id": self.end_of_text, "content": END_OF_TEXT, "special": True, "normalized": False}
        end |= {"single_word": False, "lstrip": False, "rstrip": False}
        model: dict[str, object] = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
        }
        model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
        model |= {"vocab": {name: byte for byte, name in enumerate(_byte_names())}, "merges": []}
        layers = {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level}
        head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end]}
        return json.dumps({**head, **layers, "model": model}, ensure_ascii=False, indent=2)


class JsonTokenizer:
    """A tokenizer.json, run by the tokenizers library as in transformers."""

    def __init__(self, path: Path) -> None:
        library = import_extra("tokenizers", f"data.tokenizer = {str(path)!r}")
        self._json = _read(path)
        try:
            self._tokenizer = library.Tokenizer.from_str(self._json)
        except Exception as error:  # the library raises the bare class
            raise DataError(
                f"data.tokenizer = {str(path)!r} is no valid tokenizer.json ({error}): "
                "replace it by one that the tokenizers library wrote, or set data.tokenizer to bytes"
            ) from error
        # Truncation or padding by the file would lose or add text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.end_of_text_token = _end_of_text(path, vocab)
        self.end_of_text = vocab[self.end_of_text_token]
        self.identity = _identity(self._json)
        self.version = str(library.__version__)

    def encode(self, text: str) -> Tokens:
        """Return the ids of `text`; names of special tokens in it are encoded as such, none is added."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return `encode` of each text, over all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        # An array of Python takes a list three times as fast as one of numpy does.
        return [np.asarray(array("I", encoding.ids)) for encoding in encodings]

    def encode_located(self, texts: Sequence[str]) -> list[tuple[Tokens, Places, Places]]:
        """Return uint32 ids of each text and the characters of each id; no special token is added."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        found: list[tuple[Tokens, Places, Places]] = []
        for encoding in encodings:
            places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            found.append((np.array(encoding.ids, dtype=np.uint32), places[:, 0], places[:, 1]))
        return found

    def decode(self, ids: Sequence[int] | Tokens, *, special: bool = False) -> str:
        """Return the text of `ids`, without unknown tokens, and without special ones unless `special`."""
        known = [int(token) for token in ids if 0 <= int(token) < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=not special))

    def to_tokenizer_json(self) -> str:
        """Return the file as it was read."""
        return self._json


def load_tokenizer(source: str) -> Tokenizer:
    """Return the tokenizer that data.tokenizer names: "bytes", a tokenizer.json, a folder that holds one, or a hub id.

    Raises DataError about the file, UnsupportedError without the tokenizers library.
    """
    return ByteTokenizer() if source == BYTES else JsonTokenizer(_file(source))


def identity_of(source: str) -> str:
    """Return the identity of the tokenizer that data.tokenizer names, without the tokenizers library.

    Raises DataError about the file.
    """
    return ByteTokenizer.identity if source == BYTES else _identity(_read(_file(source)))


def _file(source: str) -> Path:
    path = local_path(source)
    return path / "tokenizer.json" if path.is_dir() else path


def _identity(tokenizer_json: str) -> str:
    return f"tokenizer.json {hashlib.blake2b(tokenizer_json.encode(), digest_size=16).hexdigest()}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(
            f"data.tokenizer = {str(path)!r} does not exist: set it to bytes, or to the path of a tokenizer.json"
            + hub_advice(str(path))
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.tokenizer = {str(path)!r} is no text, so no tokenizer.json ({error}): "
            "set it to the path of a tokenizer.json, or to bytes"
        ) from error
    except OSError as error:
        raise DataError(
            f"data.tokenizer = {str(path)!r} cannot be read ({error.strerror}): "
            "change its permissions, or set data.tokenizer to bytes"
        ) from error


def _end_of_text(path: Path, vocab: dict[str, int]) -> str:
    """Return the name of the token between documents: eos_token of tokenizer_config.json, else a known name."""
    config = path.with_name("tokenizer_config.json")
    named = None
    if config.is_file():
        try:
            named = json.loads(_read(config)).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise DataError(f"{config} is not a JSON object ({error}): fix it, or remove it") from error
    name = named.get("content") if isinstance(named, dict) else named
    if name is not None:
        if name not in vocab:
            raise DataError(f"{config}: eos_token = {name!r} is not in {path}; correct eos_token")
        return str(name)
    found = next((name for name in _KNOWN_ENDS_OF_TEXT if name in vocab), None)
    if found is None:
        raise DataError(
            f"data.tokenizer = {str(path)!r} has no token to end a document with (looked for eos_token in "
            f"{config.name} next to it, then for {', '.join(_KNOWN_ENDS_OF_TEXT)}): "
            "put a tokenizer_config.json next to it that names its eos_token"
        )
    return found


def _byte_names() -> list[str]:
    """Return the character of each byte in byte-level tokenizers.

    Bytes that are printable in Latin-1 map to themselves, the others to U+0100 on, in order: the table of GPT-2's
    tokenizer, which the ByteLevel steps of the tokenizers library expect.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]
