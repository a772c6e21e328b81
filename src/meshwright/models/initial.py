"""Initial weights that depend only on (seed, parameter name, element index).

Any rank can fill any shard of any parameter, so the number of ranks, the layout and the device do not change a model's
first step. The generator is counter-based: splitmix64's mixer (Steele, Lea & Flood 2014), keyed by seed and name,
hashes an element's index, and Box & Muller (1958) map the 64 bits to one normal number.

Every operation is integer arithmetic or + - * / sqrt in float64, which IEEE 754 rounds exactly. log and cosine are
power series, since libraries may differ in the last bit between devices, or between the vectorised body and the tail of
a loop.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Normal:
    """Initialization with independent normal numbers of mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initialization with a constant."""

    value: float


class HasInitial(Protocol):
    """Module with initial values for each parameter."""

    def initial(self, fqn: str) -> Normal | Constant:
        """Return the initialization of a parameter."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, with its name."""


def initialize(module: HasInitial, seed: int) -> None:
    """Initialize the unsharded parameters of `module` in place by its method `initial(fqn)`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            origin = (0,) * parameter.dim()
            fill(parameter, module.initial(name), seed=seed, name=name, global_shape=parameter.shape, offsets=origin)


def fill(
    out: Tensor,
    initial: Normal | Constant,
    *,
    seed: int,
    name: str,
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> None:
    """Fill `out`, the shard at `offsets` of the parameter `name` of `global_shape`, in place."""
    if isinstance(initial, Constant):
        out.fill_(initial.value)
    else:
        fill_normal(out, seed=seed, name=name, global_shape=global_shape, offsets=offsets, std=initial.std)


def fill_normal(
    out: Tensor, *, seed: int, name: str, global_shape: Sequence[int], offsets: Sequence[int], std: float
) -> None:
    """Fill `out`, the shard at `offsets` of the parameter `name` of `global_shape`, from N(0, std^2) in place.

    Any device and dtype; values are rounded once. Temporary memory is a few chunks.
    """
    if out.numel() == 0:
        return
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    starts, run_length = _contiguous_runs(out.shape, global_shape, offsets, out.device)
    target = out.detach() if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    runs = target.view(-1, run_length)
    # On CPU a chunk's float64 temporaries fit the cache of a core; a GPU needs fewer, larger kernels.
    chunk = 2**16 if out.device.type == "cpu" else 2**22
    rows = max(1, chunk // run_length)
    for row in range(0, runs.shape[0], rows):
        for column in range(0, run_length, chunk):
            part = runs[row : row + rows, column : column + chunk]
            within = torch.arange(column, column + part.shape[1], device=out.device)
            part.copy_(_normal(starts[row : row + rows, None] + within, key).mul_(std))
    if target.data_ptr() != out.data_ptr():
        out.detach().copy_(target)


def _contiguous_runs(
    shape: Sequence[int], global_shape: Sequence[int], offsets: Sequence[int], device: torch.device
) -> tuple[Tensor, int]:
    # A shard is a set of equally long runs of consecutive elements: (index of each run's first element, length).
    # Unsharded trailing dims merge, so a parameter sharded on its first dim is a single run.
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(global_shape))]
    split = len(shape)
    run_length = 1
    while split > 0 and (split == len(shape) or shape[split] == global_shape[split]):
        split -= 1
        run_length *= shape[split]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    starts = torch.tensor([first], device=device)
    for size, stride in zip(shape[:split], strides[:split], strict=True):
        starts = (starts[:, None] + torch.arange(size, device=device) * stride).flatten()
    return starts, run_length


def _normal(index: Tensor, key: bytes) -> Tensor:
    bits = _hash(index, key)
    # Bits 32-63: the radius, from a uniform in (0, 1). Bits 1-31: the angle, within a quarter turn. Bit 0: the sign.
    uniform = ((bits >> 32) & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32)
    angle = ((bits >> 1) & 0x7FFFFFFF).double().add_(0.5).mul_(math.pi / 2 * 2.0**-31)
    sign = (bits & 1).double().mul_(-2.0).add_(1.0)
    return _log(uniform).mul_(-2.0).sqrt_().mul_(_cos(angle)).mul_(sign)


def _hash(index: Tensor, key: bytes) -> Tensor:
    # int64 products wrap around like uint64. The second half of the key enters between the rounds, so that two names
    # with overlapping counters still get unrelated numbers.
    first, second = (int.from_bytes(half, "little", signed=True) for half in (key[:8], key[8:]))
    bits = index * _signed(0x9E3779B97F4A7C15) + first
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9) ^ second
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def _signed(unsigned: int) -> int:
    return unsigned - 2**64


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # Logical shift: torch's >> on int64 is arithmetic.
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _log(x: Tensor) -> Tensor:
    # x = mantissa * 2**exponent; ln(mantissa / c) = 2 artanh((mantissa - c) / (mantissa + c)), whose argument stays
    # below 0.172 for c = sqrt(1/2): 9 terms leave an error of 1e-15.
    mantissa, exponent = torch.frexp(x)
    center = math.sqrt(0.5)
    ratio = (mantissa - center).div_(mantissa + center)
    series = _polynomial(ratio * ratio, [2 / (2 * k + 1) for k in range(9)]).mul_(ratio)
    return series.add_(exponent.double().sub_(0.5).mul_(math.log(2)))


def _cos(x: Tensor) -> Tensor:
    # Taylor's series; for x up to pi / 2 twelve terms leave an error below 1e-16.
    return _polynomial(x * x, [(-1) ** k / math.factorial(2 * k) for k in range(12)])


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result.mul_(x).add_(coefficient)
    return result
