"""Settings of torch's caching allocator: what the trainer sets, what an environment says, and what each does.

With fixed segments, torch's default, a block that was freed seldom serves one of another size. 23 replayed steps of
Llamas and a mixture, on 1 and 8 ranks, reserve 1.02 to 2.12 times what they allocate, and 1.01 to 1.21 times where the
device has no more; with expandable segments, whose unused pages then go back to the device, 1.01 to 1.59 times, and
1.00 to 1.02. Builds for which expandable segments are unsupported ignore the setting, with a warning.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import NamedTuple

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch looks for settings; the first that is set counts (c10/cuda/CUDAAllocatorConfig.h, PyTorch 2.13)."""

_OURS = "expandable_segments:True"


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let segments grow, unless the environment has settings already; torch reads them before its first allocation."""
    if variable_of(environment) is None:
        environment["PYTORCH_ALLOC_CONF"] = _OURS


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Return whether segments grow under the settings of `environment`; those of torch itself do not."""
    return _settings(environment).get("expandable_segments") == "True"


def variable_of(environment: Mapping[str, str]) -> str | None:
    """Return the name of the variable that counts, None where none is set."""
    return next((name for name in VARIABLES if name in environment), None)


class AllocatorSetting(NamedTuple):
    """A setting as `meshwright doctor` explains it."""

    name: str
    """Of torch."""
    value: str
    """What torch has when `meshwright train` runs here, and who set it."""
    effect: str
    advice: str


def allocator_settings(environment: Mapping[str, str]) -> list[AllocatorSetting]:
    """Return the settings that bear on fragmentation, those that are not set included."""
    variable, given = variable_of(environment), _settings(environment)
    by_user = f"by {variable}" if variable else ""
    grows = has_expandable_segments(environment)
    if variable is None:
        value = "True, set by `meshwright train`"
    elif "expandable_segments" in given:
        value = f"{given['expandable_segments']}, set {by_user}"
    else:
        value = f"False, torch's default ({variable} is set without it, and then train adds nothing)"
    found = [AllocatorSetting("expandable_segments", value, _GROWING if grows or not variable else _FIXED, _SHARING)]
    for name, (effect, advice) in _OTHERS.items():
        value = f"{given[name]}, set {by_user}" if name in given else "not set"
        found.append(AllocatorSetting(name, value, effect, advice))
    return found


def allocator_notes(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (label, text): what a reader has to know first, then of each setting its value, what it does and when to
    change it, and how.
    """
    yield (
        "fragmentation",
        "torch reserves memory from the driver in segments and serves tensors from them. Reserved memory that fits no "
        "tensor is fragmentation: `out of memory` with much `reserved but unallocated` means it",
    )
    for one in allocator_settings(environment):
        yield one.name, f"{one.value}: {one.effect}. {one.advice}"
    yield "to change one", f"before `meshwright train` set PYTORCH_ALLOC_CONF to pairs NAME:VALUE, {_OURS} among them"


_GROWING = (
    "a segment grows by pages, so that freed memory serves tensors of any size, and gives unused ones back where the "
    "device is full; replayed steps reserve up to 1.59 times what tensors take, and fit in 1.02 times"
)
_FIXED = (
    "segments have fixed sizes, so that a freed block seldom serves another size; replayed steps reserve up to 2.12 "
    "times what tensors take, and need up to 1.21 times"
)
_SHARING = "Set it to False only where other processes open CUDA tensors of these, or a library fails with it"
_OTHERS = {
    "max_split_size_mb": (
        "larger blocks are not split, so that they stay whole for tensors as large",
        "Set it only with fixed segments, if a step runs out of memory with much of it in inactive split blocks",
    ),
    "garbage_collection_threshold": (
        "beyond this share of the device, unused blocks are freed early",
        "Set it (0.8) only with fixed segments, if steps stall while torch frees all unused blocks at once",
    ),
    "roundup_power2_divisions": (
        "sizes are rounded up to parts of a power of two, so that more blocks fit again, each with some waste",
        "Set it if the sizes of tensors change from step to step, as with documents of many lengths",
    ),
}
"""Source: PyTorch 2.13, docs/source/notes/cuda.rst, "Optimizing memory usage with PYTORCH_ALLOC_CONF"."""


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    pairs = (pair.partition(":") for pair in environment.get(variable_of(environment) or "", "").split(","))
    return {key.strip(): value.strip() for key, _, value in pairs}
