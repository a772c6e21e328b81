"""Damage of a run's newest checkpoint, as a disk, a copy or a person does it."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.format.find_checkpoint import FILE_NAME
from meshwright.checkpoint.format.manifest import data_name
from meshwright.errors import ConfigError
from meshwright.spec.fault import Fault
from meshwright.spec.run.run import Run
from meshwright.spec.storage_fault import DamageKind

_PAGE_BYTES = 4096
_Damage = Callable[[Path, Path, Path, random.Random], None]
"""Takes the checkpoint, the one before, the data file in the first, and a source of chance."""


def can_damage(run: Run) -> bool:
    """Return whether the run has a checkpoint to damage and an older one to fall back to."""
    return len(run.checkpoint_steps()) > 1


def damage_newest(run: Run, fault: Fault, number: int) -> str:
    """Damage the newest checkpoint as fault `number` says, and return its name; the same number, the same damage."""
    older, newest = (run.checkpoint(step) for step in run.checkpoint_steps()[-2:])
    data = newest / data_name(fault.rank)
    # Saved by fewer ranks than there are.
    data = data if data.exists() else newest / data_name(0)
    _DAMAGES[fault.kind](newest, older, data, random.Random(number))  # type: ignore[index]
    os.sync()
    return newest.name


def _truncate(newest: Path, older: Path, data: Path, chance: random.Random) -> None:
    os.truncate(data, data.stat().st_size // 2)


def _flip_bit(newest: Path, older: Path, data: Path, chance: random.Random) -> None:
    content = bytearray(data.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    data.write_bytes(content)


def _zero_page(newest: Path, older: Path, data: Path, chance: random.Random) -> None:
    content = bytearray(data.read_bytes())
    pages = [content[start : start + _PAGE_BYTES] for start in range(0, len(content), _PAGE_BYTES)]
    # One of zeros, as of moments that are still 0, would stay what it is.
    number = chance.choice([number for number, page in enumerate(pages) if any(page)])
    start = number * _PAGE_BYTES
    content[start : start + _PAGE_BYTES] = bytes(len(pages[number]))
    data.write_bytes(content)


def _swap_shards(newest: Path, older: Path, data: Path, chance: random.Random) -> None:
    others = sorted(path for path in newest.glob("*.bin") if path != data)
    if not others:
        raise ConfigError(f"{newest} has one data file only, and swap-shards needs two: save it from two ranks or more")
    other = others[0]
    aside = data.with_suffix(".aside")
    data.rename(aside)
    other.rename(data)
    aside.rename(other)


def _shard_of_other_step(newest: Path, older: Path, data: Path, chance: random.Random) -> None:
    shutil.copyfile(older / data.name, data)


def _missing_shard(newest: Path, older: Path, data: Path, chance: random.Random) -> None:
    data.unlink()


def _stale_metadata(newest: Path, older: Path, data: Path, chance: random.Random) -> None:
    shutil.copyfile(older / FILE_NAME, newest / FILE_NAME)


def _extra_file(newest: Path, older: Path, data: Path, chance: random.Random) -> None:
    shutil.copyfile(data, newest / data_name(99999))


_DAMAGES: dict[DamageKind, _Damage] = {
    "truncate": _truncate,
    "flip-bit": _flip_bit,
    "zero-page": _zero_page,
    "swap-shards": _swap_shards,
    "shard-of-other-step": _shard_of_other_step,
    "missing-shard": _missing_shard,
    "stale-metadata": _stale_metadata,
    "extra-file": _extra_file,
}
