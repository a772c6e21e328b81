"""Settings of torch's caching allocator: what the trainer sets, and what an environment says.

With fixed segments, torch's default, a block that was freed seldom serves one of another size: replayed steps of a
Llama of 8 blocks reserve 1.21 to 1.64 times what they allocate, with expandable ones 1.12 to 1.36 times. Builds for
which expandable segments are unsupported ignore the setting, with a warning.
"""

from collections.abc import Mapping, MutableMapping

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


def allocator_notes(environment: Mapping[str, str]) -> list[str]:
    """Return what each setting that training on CUDA would have does about fragmentation, one sentence each."""
    if variable_of(environment) is None:
        return [f"{_OURS}, which train sets: {_GROWING}"]
    notes = [f"{name}:{value}: {_EFFECTS[name]}" for name, value in _settings(environment).items() if name in _EFFECTS]
    if has_expandable_segments(environment):
        return [f"{_OURS}: {_GROWING}", *notes]
    return [f"fixed segments: {_FIXED}", *notes]


_GROWING = "freed memory serves tensors of any size; replayed steps reserve 1.12 to 1.36 times what tensors take"
_FIXED = "a freed block seldom serves another size; replayed steps reserve 1.21 to 1.64 times what tensors take"
_EFFECTS = {
    "max_split_size_mb": "larger blocks are not split, so that they stay whole for tensors as large",
    "garbage_collection_threshold": "beyond this share of the device, unused blocks are freed early",
    "roundup_power2_divisions": "sizes are rounded up, so that more blocks fit again, each with some waste",
}


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    pairs = (pair.partition(":") for pair in environment.get(variable_of(environment) or "", "").split(","))
    return {key.strip(): value.strip() for key, _, value in pairs}
