"""Check that a checkpoint's data position still refers to the same samples."""

from typing import Any

from meshwright.errors import DataError

_FIELDS = {
    "data.content_hash": "the text of data.source",
    "data.num_bytes": "data.source or data.max_bytes",
    "data.tokenizer": "data.tokenizer",
    "data.end_of_text": "data.tokenizer",
    "data.num_tokens": "data.source",
    "data.seq_len": "train.seq_len",
    "data.num_training_samples": "data.validation_fraction",
    "data.num_validation_samples": "data.validation_fraction",
    "data.class": "data.source",
    "data.options": "data.options",
    "data.sample_hash": "the samples of data.source",
    "seed": "train.seed",
    "shuffle": "data.shuffle",
    "global_batch_size": "train.global_batch_size",
}
"""Parts of `Loader.position` that determine the sample order, with the key that sets each.

Not the path of a corpus, which may be moved.
"""


def check_resumable(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise DataError that lists the differences of two `Loader.position`s, if any."""
    old, new = _flat(saved), _flat(current)
    changes = [
        f"{key.removeprefix('data.')} was {old.get(key)} and is now {new.get(key)} (set by {origin})"
        for key, origin in _FIELDS.items()
        if old.get(key) != new.get(key)
    ]
    if changes:
        raise DataError(
            f"the checkpoint was trained on other samples: {'; '.join(changes)}. Resuming would repeat some samples "
            "and leave out others: put the old values back, or start a new run in another run.dir"
        )


def _flat(position: dict[str, Any]) -> dict[str, Any]:
    data = {f"data.{key}": value for key, value in position.get("data", {}).items()}
    return {**data, **{key: value for key, value in position.items() if key != "data"}}
