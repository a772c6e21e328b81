"""Sample order: a pure function of (seed, position), independent of ranks.

Global position = step * global_batch_size + slot. Position p is in epoch p // num_samples. Each epoch is one
permutation of all samples, computed by a Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002), so that no permutation is stored. `check_resumable` compares what determines the order.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.errors import DataError

Indices = npt.NDArray[np.int64]

# Four rounds suffice for wide halves; ours may be 1 bit, so more are used.
_NUM_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """Infinite sequence of sample indices, epoch after epoch."""

    num_samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        assert self.num_samples >= 1, "an order needs at least one sample"

    def samples_at(self, positions: Indices) -> Indices:
        """Return the sample index in [0, num_samples) at each global position, shaped as `positions`."""
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        if not self.shuffle:
            return offsets
        samples = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = permute(offsets[here], self.num_samples, _round_keys(self.seed, int(epoch)))
        return samples


@dataclass(frozen=True)
class Share:
    """Slots of one data-parallel rank in every global batch, by microbatch."""

    global_batch_size: int
    microbatch_size: int = 1
    dp_rank: int = 0
    dp_degree: int = 1
    member: int = 0
    """Place among independent replicas, which deal out the microbatches of these ranks in turn."""
    num_members: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_degree, f"dp_rank {self.dp_rank} of {self.dp_degree}"
        assert 0 <= self.member < self.num_members, f"member {self.member} of {self.num_members}"
        # Job.num_microbatches has raised for users.
        assert self.global_batch_size % (self.microbatch_size * self.dp_degree) == 0, f"uneven {self}"

    @property
    def slots(self) -> Indices:
        """Return this rank's slots, shaped [num_microbatches, microbatch_size].

        Microbatch m of rank r takes microbatch_size slots from (m * dp_degree + r) * microbatch_size on. Of these,
        independent replicas deal out m, so that no two numbers of them differ by more than one.
        """
        all_slots = np.arange(self.global_batch_size, dtype=np.int64)
        of_rank = all_slots.reshape(-1, self.dp_degree, self.microbatch_size)[:, self.dp_rank]
        return of_rank[self.member :: self.num_members]

    def positions(self, step: int) -> Indices:
        """Return the global positions of this rank's slots in `step`, shaped as `slots`."""
        return step * self.global_batch_size + self.slots


def permute(indices: Indices, size: int, round_keys: npt.NDArray[np.uint64]) -> Indices:
    """Return the image of each index under a keyed bijection of [0, size), in constant memory."""
    num_bits = (size - 1).bit_length()
    values = _feistel(indices.astype(np.uint64), num_bits, round_keys)
    # The network permutes [0, 2**num_bits), less than twice `size`. Repeating it for values outside of [0, size) until
    # they are inside is again a bijection (cycle walking), with two steps on average at most.
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], num_bits, round_keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], num_bits: int, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Return a keyed bijection of [0, 2**num_bits), elementwise."""
    low_bits = np.uint64((num_bits + 1) // 2)
    low_mask = np.uint64((1 << ((num_bits + 1) // 2)) - 1)
    high_mask = np.uint64((1 << (num_bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    # Halves may differ by a bit, so they are updated in turn, not swapped.
    for round_index, key in enumerate(round_keys):
        if round_index % 2:
            high = high ^ (_mix(low + key) & high_mask)
        else:
            low = low ^ (_mix(high + key) & low_mask)
    return (high << low_bits) | low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each value: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return the round keys of one epoch; a fixed byte order keeps them equal on every machine."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS, person=b"sample order").digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


_FIELDS = {
    "data.content_hash": "the text of data.source",
    "data.num_bytes": "data.source or data.max_bytes",
    "data.tokenizer": "data.tokenizer",
    "data.end_of_text": "data.tokenizer",
    "data.num_tokens": "data.source",
    "data.seq_len": "train.seq_len",
    "data.num_training_samples": "data.validation_fraction",
    "data.num_validation_samples": "data.validation_fraction",
    "data.packing": "data.packing",
    "data.too_long": "data.too_long",
    "data.chat_template": "data.chat_template",
    "data.train_on": "data.train_on",
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
