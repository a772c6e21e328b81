"""Prepared folders: all tokens of a corpus in one folder, which data.source names without its text.

    prepared.json          counts, hash of the text, and the tokenizer's identity
    tokens.bin             a token file, with its checksum
    tokenizer.json         the tokenizer, and in tokenizer_config.json its end of text, unless it is bytes
    chat_template.jinja    the template of conversations

A folder is written under a temporary name, then renamed: it is complete or not there. Reading it loads no tokenizer.
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from meshwright.data.cache.content import Content, content_from_dict
from meshwright.data.cache.token_cache import NO_SPACE, TokenCache
from meshwright.data.cache.token_file import Tokens, map_tokens, write_tokens
from meshwright.data.conversations.chat_template import TEMPLATE_FILE, TOKENIZER_CONFIG
from meshwright.data.conversations.conversation_encoder import ConversationEncoder
from meshwright.data.encoding import Encoding
from meshwright.data.tokenizer import BYTES, Tokenizer, identity_of
from meshwright.data.tokenizer_files import TOKENIZER
from meshwright.errors import ConfigError, DataError
from meshwright.spec.job.sections import DataSection

MANIFEST = "prepared.json"
_TOKENS = "tokens.bin"
_FORMATS = {"text": 1, "conversations": 2}
"""Format 1 of conversations printed the keys of tools in the order of the alphabet."""
_TOKENS_AT_ONCE = 2**22


@dataclass(frozen=True)
class PreparedTokenizer:
    """What training needs of the tokenizer of a prepared folder."""

    identity: str
    vocab_size: int
    end_of_text: int


@dataclass(frozen=True)
class PreparedFolder:
    """A folder that data.source names, as its manifest describes it."""

    folder: Path
    content: Content
    tokenizer: PreparedTokenizer
    num_tokens: int
    conversations: dict[str, str] | None
    """What tokens of conversations follow from besides, as `ConversationEncoder.learned`; None for text."""

    @property
    def tokens_path(self) -> Path:
        """Return the token file."""
        return self.folder / _TOKENS

    def problem(self, section: DataSection, encoding: Encoding) -> str | None:
        """Return why the job's other keys do not fit; None if they do."""
        if self.content.num_bytes > section.max_bytes:
            return (
                f"data.source = {section.source!r} was prepared from {self.content.num_bytes} bytes of text, more than "
                f"data.max_bytes = {section.max_bytes}: set data.max_bytes to {self.content.num_bytes} or more"
            )
        if identity_of(section.tokenizer) != self.tokenizer.identity:
            own = BYTES if self.tokenizer.identity == BYTES else str(self.folder)
            return (
                f"data.source = {section.source!r} was prepared with another tokenizer than data.tokenizer = "
                f"{section.tokenizer!r}: set data.tokenizer to {own!r}"
            )
        return self._task_problem(section, encoding)

    def _task_problem(self, section: DataSection, encoding: Encoding) -> str | None:
        """Return why the tokens are not those of the job's task."""
        held = self.conversations.get("task", "sft") if self.conversations else "pretrain"
        if held != encoding.task:
            what = {"pretrain": "text", "sft": "conversations", "dpo": "pairs of answers"}[held]
            return (
                f'data.source = {section.source!r} was prepared from {what}, not for train.task = "{encoding.task}": '
                f"set train.task to {held}, or prepare the source again"
            )
        if encoding.conversations is None or self.conversations == encoding.conversations.learned:
            return None
        assert self.conversations is not None
        return (
            f"data.source = {section.source!r} was prepared with another chat template or data.train_on: set "
            f"data.chat_template to {str(self.folder / TEMPLATE_FILE)!r} and data.train_on to "
            f"{self.conversations['train_on']}, or prepare the source again"
        )

    def read(self) -> Tokens:
        """Return the mapped tokens; raises DataError if they are damaged."""
        tokens = map_tokens(self.tokens_path, _key(self.content, self.tokenizer.identity, self.conversations))
        if tokens is None or len(tokens) != self.num_tokens:
            raise DataError(
                f"{self.tokens_path} is missing, or not what `meshwright data prepare --out` wrote: copy the folder "
                "again, or prepare it again"
            )
        return tokens


def find_prepared(section: DataSection) -> PreparedFolder | None:
    """Return the prepared folder that data.source names; None for another source. Raises DataError if it is damaged."""
    folder = Path(os.path.expanduser(section.source))
    manifest = folder / MANIFEST
    try:
        record = json.loads(manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        if not folder.is_dir():
            return None  # such as a link to itself
        raise DataError(f"{manifest} cannot be read ({error}): prepare the folder again") from error
    try:
        if record["format"] != (readable := _format(record["conversations"])):
            raise DataError(
                f"{manifest} is of format {record['format']}, and this version reads {readable}: prepare it again"
            )
        tokenizer = PreparedTokenizer(**record["tokenizer"])
        content = content_from_dict(record["content"])
        return PreparedFolder(folder, content, tokenizer, record["num_tokens"], record["conversations"])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{manifest} is no manifest of prepared tokens ({error!r}): prepare the folder again"
        ) from error


def require_absent(folder: Path) -> None:
    """Raise ConfigError unless a folder can be written: nothing is there, and what is to hold it is a folder."""
    if folder.exists():
        raise ConfigError(f"--out {folder} exists: name a new folder, or remove it")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"--out {folder}: there is no folder {folder.absolute().parent}: make it")


def write_prepared(folder: Path, cache: TokenCache, tokenizer: Tokenizer) -> None:
    """Write the tokens of a filled cache as a prepared folder; raises DataError where there is no room."""
    tokens = cache.tokens()
    parent = folder.absolute().parent
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as name:
            partial = Path(name, "folder")
            partial.mkdir()
            encoder = cache.encoder
            conversations = encoder if isinstance(encoder, ConversationEncoder) else None
            _write(partial, tokens, cache.content, tokenizer, conversations)
            partial.rename(folder)
    except OSError as error:
        remedy = "free some space there" if error.errno in NO_SPACE else "change its permissions"
        raise DataError(
            f"--out {folder} cannot be written ({error.strerror or error}): {remedy}, or name another folder"
        ) from error


def _write(
    folder: Path, tokens: Tokens, content: Content, tokenizer: Tokenizer, conversations: ConversationEncoder | None
) -> None:
    learned = None if conversations is None else conversations.learned
    runs = (tokens[start : start + _TOKENS_AT_ONCE] for start in range(0, len(tokens), _TOKENS_AT_ONCE))
    with (folder / _TOKENS).open("w+b") as file:
        write_tokens(file, _key(content, tokenizer.identity, learned), np.dtype(tokens.dtype), runs)
    special_tokens = {"eos_token": tokenizer.end_of_text_token}
    if conversations is not None:
        special_tokens = conversations.template.special_tokens
        (folder / TEMPLATE_FILE).write_text(conversations.template.source, encoding="utf-8")
    if tokenizer.identity != BYTES:
        (folder / TOKENIZER).write_text(tokenizer.to_tokenizer_json(), encoding="utf-8")
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(special_tokens), encoding="utf-8")
    needed = PreparedTokenizer(tokenizer.identity, tokenizer.vocab_size, tokenizer.end_of_text)
    manifest = {
        "format": _format(learned),
        "num_tokens": len(tokens),
        # Its parts say how to make the tokens, which is done.
        "content": asdict(replace(content, parts=())),
        "tokenizer": asdict(needed),
        "conversations": learned,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _format(learned: dict[str, str] | None) -> int:
    return _FORMATS["conversations" if learned else "text"]


def _key(content: Content, tokenizer_identity: str, learned: dict[str, str] | None) -> str:
    return " ".join([content.content_hash, tokenizer_identity, *(learned or {}).values()])
