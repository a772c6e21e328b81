"""What a folder of a Hugging Face model has of a tokenizer: only a tokenizer.json is read."""

from pathlib import Path

TOKENIZER = "tokenizer.json"
_OTHERS = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


def other_tokenizer_files(folder: Path) -> list[str]:
    """Return the files of a tokenizer in `folder` that are not read, where it has no tokenizer.json; else none."""
    if (folder / TOKENIZER).is_file():
        return []
    return [name for name in _OTHERS if (folder / name).is_file()]


def advice_to_make_one(source: str, target: str) -> str:
    """Return how transformers writes the tokenizer of the folder `source` as `target`/tokenizer.json."""
    return f"`AutoTokenizer.from_pretrained({source!r}).save_pretrained({target!r})` of transformers writes one"
