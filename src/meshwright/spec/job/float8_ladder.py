"""The order in which float8 recipes replace each other: the next simpler one that a device runs, or none.

    mxfp8 -> rowwise -> tensorwise -> none          rowwise_with_gw_hp -> tensorwise -> none

The planner asks this of the catalogue's device, the trainer of the kernels that it tries
(parallelism/float8/float8_kernels.py), both in this order and with the same sentence.
"""

from meshwright.spec.job.sections import Float8Recipe, PrecisionSection
from meshwright.spec.machine.device import Device

_SIMPLER: dict[Float8Recipe, Float8Recipe] = {
    "mxfp8": "rowwise",
    "rowwise": "tensorwise",
    "rowwise_with_gw_hp": "tensorwise",
    "tensorwise": "none",
}
_BLOCK_SCALES = "blackwell"
"""How the names of architectures begin whose matmuls take a scale for each 32 elements."""
_LIKE_NVIDIA = ("hopper", "blackwell")
"""How those begin by which a user's own entry asks to be priced as a family that was tried in float8."""


EMULATED = "computes float8 emulated, in more time than without"
"""What a processor does, as what follows its name."""


def recipes_down_from(wanted: Float8Recipe) -> list[Float8Recipe]:
    """Return `wanted` and the recipes that may replace it, simplest last and without none."""
    found: list[Float8Recipe] = []
    while wanted != "none":
        found.append(wanted)
        wanted = _SIMPLER[wanted]
    return found


def recipe_of_device(wanted: Float8Recipe, device: Device) -> tuple[Float8Recipe, str]:
    """Return the recipe that `device` runs, and why not `wanted` where it is another."""
    obstacles = [(recipe, obstacle(recipe, device)) for recipe in recipes_down_from(wanted)]
    found: Float8Recipe = next((recipe for recipe, why in obstacles if not why), "none")
    return found, "" if found == wanted else obstacles[0][1]


def obstacle(recipe: Float8Recipe, device: Device) -> str:
    """Return why `device` does not run `recipe`, as what follows its name; "" where it does."""
    if device.emulates_float8:
        return EMULATED
    if device.vendor != "nvidia" and not (device.architecture or "").startswith(_LIKE_NVIDIA):
        return 'was never tried in float8 (an entry with architecture = "hopper" or "blackwell" is priced in it)'
    if not any(rates.of("float8") for rates in (device.dense_flops_per_s, device.measured_matmul_flops_per_s)):
        return "has no float8 units"
    if recipe == "mxfp8" and not (device.architecture or "").startswith(_BLOCK_SCALES):
        return "has no units for MXFP8's scales of blocks"
    return ""


def experts_obstacle(device: Device) -> str:
    """Return why `device` runs no grouped float8 matmul of experts, as what follows its name; "" where it does."""
    if device.emulates_float8 or (device.architecture or "").startswith("hopper"):
        return ""
    return "was never tried with grouped float8 matmuls"


def fallback_text(asked: PrecisionSection, found: Float8Recipe, device: Device, why: str) -> str:
    """Return that `found` runs on `device` in place of the recipe that is asked for, as what follows its name."""
    instead = f"in {asked.compute}" if found == "none" else f'by "{found}"'
    verb = "priced" if device.emulates_float8 else "computed"
    return f"{device.name} {why}; {verb} {instead}"
