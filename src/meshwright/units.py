"""Conversions at the edges: parse what people write, print what people read; label_of(): the words for a field.

Inside, every quantity is in SI base units (seconds, bytes, FLOPs). GB = 1e9 bytes, GiB = 2**30 bytes.
"""

import re
from collections.abc import Sequence

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([kKMGBT]?)\s*$")


def parse_count(text: str) -> int:
    """Return the whole number that `text` means: "512", "4M" (4 000 000), "1.5k"."""
    match = _COUNT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no count: write digits with an optional k, M, G (or B) or T, such as 4M")
    count = float(match[1]) * _DECIMAL[match[2]]
    if count != int(count):
        raise ValueError(f"{text!r} is no whole number")
    return int(count)


def format_count(count: float) -> str:
    """Return `count` with three significant digits and a decimal suffix: 1_235_814_400 -> "1.24B"."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size * 0.9995:
            return f"{count / size:.3g}{suffix}"
    return f"{count:.3g}"


def counted(number: int, word: str, plural: str | None = None) -> str:
    """Return `number` and its word, in the plural (word + "s" without `plural`) unless it is 1: "1 rank", "2 ranks"."""
    return f"{number} {word if number == 1 else plural or word + 's'}"


def first_of(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first `most` names, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in binary units: 1536 -> "1.5 KiB"."""
    for size, suffix in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(num_bytes) >= size:
            return (
                f"{num_bytes / size:.3g} {suffix}"
                if abs(num_bytes) < 999.5 * size
                else f"{num_bytes / size:.0f} {suffix}"
            )
    return f"{num_bytes:.0f} B"


def format_bytes_apart(num_bytes: float, other_bytes: float) -> tuple[str, str]:
    """Return two sizes in binary units, or in bytes where they differ by less than these show."""
    texts = format_bytes(num_bytes), format_bytes(other_bytes)
    if texts[0] != texts[1] or num_bytes == other_bytes:
        return texts
    return f"{num_bytes:,.0f} B", f"{other_bytes:,.0f} B"


def format_duration(duration_s: float) -> str:
    """Return a duration in the two largest units that matter: 3725 s -> "1 h 02 min"; below a nanosecond 0 s."""
    if abs(duration_s) < 1e-9:
        return "0 s"
    # What would be rounded to 1000 of a unit is 1 of the next.
    if duration_s < 0.9995e-3:
        return f"{duration_s * 1e6:.3g} us"
    if duration_s < 0.9995:
        return f"{duration_s * 1e3:.3g} ms"
    if duration_s < 60:
        return f"{duration_s:.3g} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def format_interval(duration_s: float, relative_error: float) -> tuple[str, str]:
    """Return a duration and both ends of its interval in one unit: ("53.9 s", "40.4 to 67.4 s")."""
    units = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
    size, unit = next((one for one in units if duration_s >= 0.9995 * one[0]), (1e-6, "us"))
    factors = (1.0, max(0.0, 1 - relative_error), 1 + relative_error)
    # Ends above 1000 stay in the unit of the duration, in whole numbers.
    numbers = (duration_s * factor / size for factor in factors)
    value, low, high = (f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}" for number in numbers)
    return f"{value} {unit}", f"{low} to {high} {unit}"


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """Return the positive multiples of `divisor` next to `value`, which is none itself: one below and one above."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]


_UNIT = re.compile(r"(?<!_per)_(s|bytes)$")
_SPELLED = {
    word.lower(): word for word in ("CP", "CPU-bound", "DP", "EP", "FLOPs", "FSDP", "GEMM", "HFU", "MFU", "P2P")
}
_SPELLED |= {"tp": "TP", "memory-bound": "memory-bound"}


def label_of(key: str) -> str:
    """Return the words for a key: "optimizer state" for optimizer_state_bytes, "tokens/s" for tokens_per_s."""
    words = _UNIT.sub("", key.removeprefix("num_")).replace("_per_", "/").replace("_bound", "-bound").split("_")
    return " ".join(_SPELLED.get(word, word) for word in words)
