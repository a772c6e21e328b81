"""AttentionRates: FLOP/s that attention reaches, by the kernel that computes it.

    forward    16-bit dense peak x share of the kernel x context / (context + ramp), x a factor for heads under 96 wide
    backward   that x the kernel's rate of backward over forward; FLOPs are 2.5 times those of forward

    published  software of others, and ours where auto takes the kernel that they took: attention.ARCH, fitted on runs
               with a vendor's kernels, x attention_generic.ARCH without, which is FlashAttention 2
    cudnn      attention_cudnn.ARCH, measured; attention.ARCH where none was measured
    flash      FlashAttention 2: that of cudnn x attention_flash.ARCH where that is published, on Hopper
    varlen     the kernel of flash; on Blackwell as flex
    flex       that of flash x attention_flex; on Blackwell that of cudnn x attention_triton.blackwell
    efficient  that of flash x attention_efficient

auto is torch's own choice: cuDNN on Hopper, with torch 2.11 or newer built with a cuDNN newer than 9.15
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), in 16 bits, for heads that it takes, else flash. On Blackwell
torch chooses cuDNN, too, whose rate the published runs have. A ring's pieces are flash. In 32 bits all but flex is
published. Ignored: that deterministic runs and older libraries take flash; what a mask costs the kernel; clocks that
fall under load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from meshwright.cost.achieved_rates import Peaks, architecture_of, is_blackwell, share_of_peak
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Floats
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.layout.attention_backend import AttentionBackend
from meshwright.spec.machine.device import Device

AttentionKernel = Literal["published", "cudnn", "flash", "varlen", "flex", "efficient"]


CHOSEN_KERNELS: tuple[AttentionKernel, ...] = ("published", "cudnn")
"""By which torch's own choice goes: what was timed of it is not that of another backend."""
_KERNELS: dict[AttentionBackend, AttentionKernel] = {
    "cudnn": "cudnn",
    "flash": "flash",
    "varlen": "varlen",
    "flex": "flex",
    "efficient": "efficient",
}


class KernelRate(NamedTuple):
    """What a kernel reaches on one device."""

    share: float
    """Of the 16-bit dense peak, forward, on long sequences."""
    backward: float
    """Rate of backward over forward."""
    narrow: float
    """Rate of heads under 96 wide over that of wider ones."""


@dataclass(frozen=True)
class AttentionRates:
    """One element a setup."""

    flops_per_s: Floats
    """Forward, on long sequences of wide heads."""
    backward: Floats
    narrow: Floats


def attention_rates_of(setups: Sequence[TrainingSetup], peaks: Peaks, constants: Constants) -> AttentionRates:
    """Return the rates of the kernel that each setup's attention has, where one rank has whole sequences."""
    rates = [setup_rate(setup, constants) for setup in setups]
    share, backward, narrow = (np.array(column, np.float64) for column in zip(*rates, strict=True))
    power = peaks.power_share ** constants["power_exponent"]
    return AttentionRates(peaks.dense16 * share * power, backward, narrow)


def setup_rate(setup: TrainingSetup, constants: Constants) -> KernelRate:
    """Return the rate of the kernel that computes a setup's attention."""
    device, stack = setup.cluster.device, setup.stack
    rate = kernel_rate(device, kernel_of(setup, constants), stack.kernels, constants)
    if stack.low_precision_attention and setup.is_low_precision:
        return rate._replace(share=rate.share * constants["attention8"])
    return rate


def ring_slowdown(setup: TrainingSetup, constants: Constants, *, is_narrow: bool) -> tuple[float, float]:
    """Return the time of flash attention, which computes a ring's pieces, over that of the setup's kernel: forward and
    backward.
    """
    own = setup_rate(setup, constants)
    if kernel_of(setup, constants) != "cudnn":
        return 1.0, 1.0
    flash = kernel_rate(setup.cluster.device, "flash", setup.stack.kernels, constants)
    forward = own.share / flash.share * (own.narrow / flash.narrow if is_narrow else 1.0)
    return forward, forward * own.backward / flash.backward


def kernel_of(setup: TrainingSetup, constants: Constants) -> AttentionKernel:
    """Return the kernel that computes a setup's attention."""
    backend = setup.attention_backend
    if not setup.is_own or (setup.has_wide_activations and backend != "flex"):
        return "published"
    if (kernel := _KERNELS.get(backend)) is not None:
        return kernel
    if not chooses_cudnn(setup.cluster.device, constants):
        return "published"
    return "cudnn" if setup.takes_cudnn else "flash"


def chooses_cudnn(device: Device, constants: Constants) -> bool:
    """Return whether torch prefers cuDNN's kernels on the device, and their rate there was measured."""
    return f"attention_cudnn.{architecture_of(device)}" in constants


def kernel_rate(device: Device, kernel: AttentionKernel, kernels: str, constants: Constants) -> KernelRate:
    """Return the rate of a kernel; `kernels` as in Stack.kernels, which says what "published" is."""
    c, architecture = constants, architecture_of(device)
    if kernel == "published":
        share = share_of_peak("attention", device, c)
        # Where no vendor's kernel is faster than FlashAttention 2, there is no constant.
        share *= 1.0 if kernels == "fused" else c.get(f"attention_generic.{architecture}", 1.0)
        return KernelRate(share, c["attention_backward"], c["narrow_head"])
    newest = c.get(f"attention_cudnn.{architecture}", share_of_peak("attention", device, c))
    if kernel == "cudnn":
        is_measured = chooses_cudnn(device, c)
        names = ("attention_backward.cudnn", "narrow_head.cudnn") if is_measured else _FLASH
        return KernelRate(newest, c[names[0]], c[names[1]])
    flash = newest * c.get(f"attention_flash.{architecture}", 1.0)
    if is_blackwell(device) and kernel in ("flex", "varlen"):
        flash = newest * c["attention_triton.blackwell"]
    elif kernel == "flex":
        flash *= c["attention_flex"]
    if kernel == "flex":
        return KernelRate(flash, c["attention_backward"] * c["flex_backward"], c["narrow_head"])
    share = flash * (c["attention_efficient"] if kernel == "efficient" else 1.0)
    return KernelRate(share, c["attention_backward"], c["narrow_head"])


_FLASH = ("attention_backward", "narrow_head")
