"""One [data] of each kind of source, small enough that a run of a hundred samples begins it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from written_corpora import write_megatron, write_tar

SEQ_LEN = 32
KINDS = ("text", "mixture", "packed", "conversations", "own", "stream", "stateless stream")
STREAMS = ("stream", "stateless stream")
"""Kinds that no worker processes of ours read."""


def write_data(folder: Path, kind: str) -> tuple[dict[str, Any], str]:
    """Return the section [data] of a kind, whose files are written into `folder`, and the train.task for it."""
    section = _SECTION_OF[kind](folder)
    common = {"cache_dir": str(folder / "cache")}
    return common | section, "sft" if kind == "conversations" else "pretrain"


def _text(folder: Path) -> dict[str, Any]:
    file = folder / "corpus.txt"
    file.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(80)))
    return {"source": str(file), "validation_fraction": 0.1}


def _mixture(folder: Path) -> dict[str, Any]:
    lines = [json.dumps({"text": f"{n} plus {n} is {2 * n}. " * 3}) for n in range(20)]
    web = _write(folder / "web.jsonl", [*lines, "{", lines[0]])
    code = write_tar(folder / "code.tar", {f"{n}.txt": f"def f{n}(): return {n}\n".encode() * 4 for n in range(20)})
    books = write_megatron(folder / "books", [[*f"book {n}, ".encode() * 5, 256] for n in range(20)])
    tables = [
        {"source": web, "weights": [0.6, 0.2]},
        {"source": str(code), "weights": [0.3, 0.2], "text_key": ".txt"},
        {"source": str(books), "weights": [0.1, 0.6]},
    ]
    return {"mixture": tables, "stage_steps": [4], "on_bad_document": "skip", "validation_fraction": 0.1}


def _packed(folder: Path) -> dict[str, Any]:
    texts = [json.dumps({"text": "word " * (1 + n % 5) + str(n)}) for n in range(60)]
    source = _write(folder / "texts.jsonl", texts)
    return {"source": source, "packing": "whole", "mask_documents": True, "deduplicate": True}


def _conversations(folder: Path) -> dict[str, Any]:
    turns = [[("user", str(n)), ("assistant", "x" * (n % 7) + str(n))] for n in range(40)]
    messages = [[{"role": role, "content": text} for role, text in one] for one in turns]
    source = _write(folder / "chats.jsonl", [json.dumps({"messages": one}) for one in messages])
    return {"source": source, "packing": "whole", "mask_documents": True}


def _write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def _named(name: str, **options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda _: {"source": f"sample_sources:{name}", "options": options, "validation_fraction": 0.0}


_SECTION_OF: dict[str, Callable[[Path], dict[str, Any]]] = {
    "text": _text,
    "mixture": _mixture,
    "packed": _packed,
    "conversations": _conversations,
    "own": _named("Numbered", length=50),
    "stream": _named("Counting", length=50),
    "stateless stream": _named("Iterable", length=50),
}
