"""BlockTimes: seconds of one block's forward and backward pass for one microbatch, cause by cause, nothing overlapped.

    matmuls     tile_flops / rate, or their bytes / memory rate; the backward pass has two for each, less those
                of frozen weights' gradients and of inputs' that nothing trained has made
    attention   FLOPs / (rate x ramp) flash, with 2.5 x the FLOPs backward; unfused: matmuls and passes over scores
    memory      elements x 2 bytes x passes / memory rate, plus casts to 8 bits and float32 gradient sums; for our own
                trainer the bytes that its kernels were counted to move (own_elements.py)
    host        launches x seconds of a launch

Sources: FlashAttention (arXiv:2205.14135) for the 2.5; the rest are definitions. What is fitted is in constants.toml.
Ignored: dropout, biases, L2 hits between kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.cost.achieved_rates import Peaks, Rates, is_blackwell
from meshwright.cost.attention_rates import attention_rates_of
from meshwright.cost.blocks.work import Work
from meshwright.cost.compute.loss_bytes import loss_bytes
from meshwright.cost.compute.matmul import MatmulSizes, is_misaligned, matmul_bytes, tile_flops
from meshwright.cost.compute.measured_kernels import (
    MeasuredTimes,
    attention_times,
    measured_products_s,
    times_of_setups,
)
from meshwright.cost.compute.op_shapes import ATTENTION_BACKWARD_FLOPS, NARROW_HEAD
from meshwright.cost.compute.own_kernels import end_kernels, own_kernels
from meshwright.cost.compute.recomputed_elements import kernels_left_out
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Bools, Floats, Passes
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.step.stack import Stack
from meshwright.spec.step.workload import BYTES_PER_ELEMENT

_FLOAT32_BYTES = 4.0
_GRADIENT_BYTES = 2.0
"""Of one 16-bit element that a matmul writes, and that is read to be added where the matmul does not add itself."""
_CAST_BYTES = 3.0
"""Of one element: 16 bits read, 8 written."""


@dataclass(frozen=True)
class BlockTimes:
    """One element a row; seconds unless the name says otherwise."""

    ideal_matmul: Floats
    """Forward matmuls at the dense peak."""
    needless_matmul: Floats
    """Those of the two products in backward that nothing needs, at the dense peak: nothing where all is trained."""
    ideal_attention: Floats
    reached_matmul: Floats
    """Matmuls of both passes at the rates of large ones."""
    matmul: Passes
    """Forward, backward."""
    expert_share: Floats
    """Share of the matmuls' backward that is experts'."""
    attention_share: Floats
    """Share of those around attention."""
    attention: Passes
    memory: Passes
    memory_again: Floats
    """Of memory-bound ops what recomputing all of forward adds to both passes."""
    host: Passes


class BlockPricer:
    """What does not depend on constants, computed once: tiles, bytes, FLOPs."""

    def __init__(self, work: Work, setups: tuple[TrainingSetup, ...], peaks: Peaks) -> None:
        self.work, self.setups, self.peaks = work, setups, peaks
        self.block_setup = work.setup_index[work.blocks.key]
        lines = work.matmuls
        self.line_setup = self.block_setup[lines.block]
        low = np.array([s.is_low_precision for s in setups])
        four = np.array([s.workload.matmul_dtype == "float4" for s in setups])
        wide = np.array([s.workload.activation_element_bytes for s in setups], np.float64)
        self.is_low = low[self.line_setup] & lines.is_low
        keeps_gw = np.array([s.workload.precision == "float8-rowwise-with-gw-hp" for s in setups])
        own_experts = np.array([s.own_float8_experts for s in setups])[self.line_setup] & lines.is_expert
        self.is_low_gw = self.is_low & ~keeps_gw[self.line_setup] & ~own_experts
        """The same of the products that are gradients of weights."""
        self.is_own_rowwise = np.array([s.own_float8.startswith("float8-rowwise") for s in setups])[self.line_setup]
        self.is_own_plain = np.array([s.own_float8 == "float8-tensorwise" for s in setups])[self.line_setup]
        self.element_bytes = np.where(self.is_low, np.where(four[self.line_setup], 0.5, 1.0), wide[self.line_setup])
        self.element_bytes = np.where(lines.is_float32, _FLOAT32_BYTES, self.element_bytes)
        self.activation_bytes = wide[self.block_setup]
        new = np.array([is_blackwell(s.cluster.device) for s in setups])
        self.is_new = new[self.line_setup]
        self.flops = 2 * lines.groups * lines.m * lines.n * lines.k
        self._tiles: dict[float, list[Floats]] = {}
        m, n, k, g = lines.m, lines.n, lines.k, lines.groups
        self.passes = [(m, n, k), (m, k, n), (k, n, m)]
        of_gw = np.where(self.is_low & ~self.is_low_gw, wide[self.line_setup], self.element_bytes)
        of_passes = (self.element_bytes, self.element_bytes, of_gw)
        self.bytes = [matmul_bytes(*shape, g, size) for shape, size in zip(self.passes, of_passes, strict=True)]
        # One chunk after the other is added to the sum of the head's gradient.
        self.bytes[2] = self.bytes[2] + np.where(lines.is_early | lines.runs_again, g * n * k * self.element_bytes, 0.0)
        self.misaligned = is_misaligned(n, k, self.element_bytes)
        self.weights = np.where(lines.has_weight_gradient, g * n * k, 0.0)
        self.casts = (lines.cast_inputs + lines.cast_weights, lines.cast_outputs + lines.cast_weights)
        self.own_kernels = own_kernels(work, setups)
        self.measured, self.measured_products = self._measured()

    def _measured(self) -> tuple[MeasuredTimes, list[Floats] | None]:
        """Return what was timed: fields of BlockTimes, and the products of each line of matmuls."""
        times = times_of_setups(self.work, self.setups, attention_times)
        return times, measured_products_s(self.work, self.setups)

    def tiles(self, small_tile: float) -> list[Floats]:
        """Return the tile FLOPs of the three passes, kept for the constant they were made with."""
        if small_tile not in self._tiles:
            sms = self.peaks.num_sms[self.line_setup]
            share = np.where(self.is_new, small_tile, 1.0)
            lines = self.work.matmuls
            # The last pass sums over rows, whose tiles are those of the weights.
            routed = (lines.is_expert, lines.is_expert, np.zeros_like(lines.is_expert))
            sizes = [MatmulSizes(*one, lines.groups, is_it) for one, is_it in zip(self.passes, routed, strict=True)]
            self._tiles = {small_tile: [tile_flops(one, sms, share) for one in sizes]}
        return self._tiles[small_tile]

    def price(self, rates: Rates, constants: Constants) -> BlockTimes:
        """Return the seconds of every row."""
        reached, back, of_gw = (
            self._reached(rates, constants, is_low, is_backward=is_backward)
            for is_low, is_backward in ((self.is_low, False), (self.is_low, True), (self.is_low_gw, True))
        )
        seconds = self._matmuls(rates, (reached, back, of_gw), constants)
        lines = self.work.matmuls
        back_passes, gw_passes = lines.has_input_gradient * 1.0, lines.has_weight_gradient * 1.0
        gradients = back_passes * seconds[1] + gw_passes * seconds[2]
        early = self.work.matmuls.is_early
        forward = self._by_block(seconds[0] + np.where(early, gradients, 0.0))
        again = np.where(lines.runs_again, seconds[0], 0.0)
        backward = self._by_block(np.where(early, 0.0, gradients) + again)
        experts, around = (
            self._by_block(np.where(mask, gradients, 0.0)) / np.maximum(backward, 1e-30)
            for mask in (self.work.matmuls.is_expert, self.work.matmuls.is_attention)
        )
        attention, ideal_attention = self._attention(rates, constants)
        ideal = self._by_block(self.flops / self.peaks.dense[self.line_setup])
        memory, again = self._memory(rates, constants)
        times = BlockTimes(
            ideal_matmul=ideal,
            needless_matmul=self._by_block(self._num_left_out() * self.flops / self.peaks.dense[self.line_setup]),
            ideal_attention=ideal_attention,
            reached_matmul=self._by_block(
                (1 + lines.runs_again) * (self.flops / reached)
                + back_passes * (self.flops / back)
                + gw_passes * (self.flops / of_gw)
            ),
            matmul=(forward, backward),
            expert_share=experts,
            attention_share=around,
            attention=attention,
            memory=memory,
            memory_again=again,
            host=self._host(constants),
        )
        return _measured_first(times, self.measured)

    def _num_left_out(self) -> Floats:
        """Return how many of a matmul's two products in backward nothing needs."""
        lines = self.work.matmuls
        return np.asarray(2.0 - lines.has_input_gradient - lines.has_weight_gradient, np.float64)

    def _by_block(self, values: Floats) -> Floats:
        return np.asarray(np.bincount(self.work.matmuls.block, values, len(self.work.blocks.key)), np.float64)

    def _reached(self, rates: Rates, constants: Constants, is_low: Bools, *, is_backward: bool) -> Floats:
        low = rates.matmul[self.line_setup]
        # torchao runs backward's products by rows on the kernel of whole tensors, and scales them after.
        is_expert = self.work.matmuls.is_expert
        low = np.where(is_backward & self.is_own_rowwise & ~is_expert, low / constants["rowwise"], low)
        # Experts are scaled by rows whatever the recipe of linear layers is.
        low = np.where(is_expert & self.is_own_plain, low * constants["rowwise"], low)
        rate = np.where(is_low, low, rates.matmul16[self.line_setup])
        rate = np.where(self.work.matmuls.is_float32, rates.matmul32[self.line_setup], rate)
        slower = np.where(self.work.matmuls.is_expert, constants["experts"], 1.0)
        return np.asarray(rate / slower / constants["misaligned"] ** self.misaligned)

    def _matmuls(self, rates: Rates, reached: Sequence[Floats], constants: Constants) -> list[Floats]:
        """Return the seconds of each line, forward and in the two passes of backward."""
        memory = rates.memory[self.line_setup]
        fused = np.array([s.stack.grouped_experts for s in self.setups])[self.line_setup]
        num_kernels = np.where(fused, 1.0, self.work.matmuls.groups)
        seconds = [
            np.maximum(tiles / rate, num_bytes / memory) + constants["kernel_s"] * num_kernels
            for tiles, rate, num_bytes in zip(
                self.tiles(constants["small_tile.blackwell"]), reached, self.bytes, strict=True
            )
        ]
        if (known := self.measured_products) is None:
            return seconds
        # No kernel takes less than its start, however small the sizes beyond those that were measured.
        known = [np.maximum(one, constants["kernel_s"]) for one in known]
        return [np.where(np.isnan(one), formula, one) for formula, one in zip(seconds, known, strict=True)]

    def _attention(self, rates: Rates, constants: Constants) -> tuple[Passes, Floats]:
        blocks, setup = self.work.blocks, self.block_setup
        ramp = blocks.context / (blocks.context + constants["attention_ramp_tokens"])
        reached = attention_rates_of(self.setups, self.peaks, constants)
        narrow = np.where(blocks.head_width < NARROW_HEAD, reached.narrow[setup], 1.0)
        flash = blocks.attention_flops / (reached.flops_per_s[setup] * ramp * narrow)
        flash_back = ATTENTION_BACKWARD_FLOPS * flash / reached.backward[setup]
        # Rates of other software were fitted without the start of a kernel.
        start_s = np.where(np.isnan(self.own_kernels[0]), 0.0, constants["kernel_s"]) * (blocks.attention_flops > 0)
        flash, flash_back = flash + start_s, flash_back + start_s
        whole = 4 * blocks.score_elements * blocks.head_width
        of_8, of_1 = constants["unaligned_head.8"], constants["unaligned_head.1"]
        alignment = np.where(blocks.head_width % 64 == 0, 1.0, np.where(blocks.head_width % 8 == 0, of_8, of_1))
        products = whole / (rates.matmul16[setup] * constants["unfused_matmul"]) * alignment
        passes = blocks.score_elements * 2 * constants["unfused_passes"] / rates.memory[setup]
        is_flash = np.array([s.stack.attention == "flash" for s in self.setups])[setup]
        forward = np.where(is_flash, flash, products + passes)
        backward = np.where(is_flash, flash_back, 2 * products + constants["unfused_backward_passes"] * passes)
        return (forward, backward), blocks.attention_flops / self.peaks.dense[setup]

    def _memory(self, rates: Rates, constants: Constants) -> tuple[Passes, Floats]:
        blocks, setup = self.work.blocks, self.block_setup
        memory = rates.memory[setup]
        passes = np.array([constants[f"passes.{s.stack.kernels}"] for s in self.setups])[setup]
        biased = np.array([constants["biased_passes"] * _unfused(s, constants) for s in self.setups])[setup]
        routed = np.array([constants["routing_passes"] * _unfused(s, constants) for s in self.setups])[setup]
        is_routed = blocks.routed_copies > 0
        passes = passes * np.where(is_routed, routed, 1.0)
        elements = blocks.memory_elements * passes + blocks.biased_elements * biased
        forward = elements * self.activation_bytes / memory
        loss_f, loss_b = (
            blocks.loss_elements * num_bytes / memory for num_bytes in loss_bytes(self.work, self.setups, passes)
        )
        casts = np.array([_casts(s, constants) for s in self.setups])[self.line_setup]
        casts = np.where(self.is_low, _CAST_BYTES * casts, 0.0) / rates.memory[self.line_setup]
        cast_forward, cast_backward = (self._by_block(casts * elements) for elements in self.casts)
        widened = [
            self._by_block(moved * _GRADIENT_BYTES / memory[self.work.matmuls.block])
            for moved in (self.work.matmuls.weight_moves, self.work.matmuls.weight_moves_again)
        ]
        sums = np.array([_sum_bytes(s, constants) for s in self.setups])[setup]
        sums = self._by_block(self.weights) * sums / memory
        started = constants["launches_per_op"] * blocks.num_ops + blocks.num_adapters
        starts_f, starts_b = (
            constants["kernel_s"] * np.where(np.isnan(own), times * started, own + around)
            for own, around, times in zip(self.own_kernels, end_kernels(self.work, self.setups), (1, 2), strict=True)
        )
        own_forward, own_backward = (
            moved * self.activation_bytes / memory
            for moved in (
                blocks.own_forward_elements + blocks.eager_forward_elements,
                blocks.own_backward_elements + blocks.eager_backward_elements,
            )
        )
        passes_s = (
            forward + starts_f + own_forward + loss_f + cast_forward + widened[0],
            2 * forward + starts_b + own_backward + loss_b + cast_backward + sums + widened[1],
        )
        again = blocks.recomputed_elements * self.activation_bytes / memory + cast_forward
        again = again + constants["kernel_s"] * kernels_left_out(self.own_kernels[0]) + widened[0] - widened[1]
        return passes_s, np.where(np.isnan(again), passes_s[0], again)

    def _host(self, constants: Constants) -> Passes:
        blocks, setup = self.work.blocks, self.block_setup
        launch = np.array([self._launch_s(s, constants) for s in self.setups])[setup]
        exchange = np.array([_exchange_launches(s, constants) for s in self.setups])[setup]
        low = np.array([s.is_low_precision for s in self.setups])[setup]
        # Of an adapter two matrices and a sum.
        count = blocks.num_ops * constants["launches_per_op"] + 3 * blocks.num_adapters
        count = count + constants["low_precision_launches"] * low
        count = count + constants["collective_launches"] * blocks.num_tp_collectives
        count = count + np.where(blocks.routed_copies > 0, exchange, 0.0)
        tp = self.work.keys.tp[blocks.key]
        slowest = 1 + constants["host_jitter"] * (tp - 1)
        matmuls, attention = self._by_block(np.ones(len(self.flops))), blocks.attention_flops > 0
        products = matmuls, 2 * matmuls - self._by_block(self._num_left_out())
        own_f, own_b = (
            kernels + of_matmuls + attention + constants["collective_launches"] * blocks.num_tp_collectives
            for kernels, of_matmuls in zip(self.own_kernels, products, strict=True)
        )
        forward = np.where(np.isnan(own_f), count, own_f)
        backward = np.where(np.isnan(own_b), constants["backward_launches"] * count, own_b)
        return forward * launch * slowest, backward * launch * slowest

    def _launch_s(self, setup: TrainingSetup, constants: Constants) -> float:
        figure = setup.cluster.device.host_launch_s
        # Of this machine's own host, as in a simulation.
        return formula_launch_s(setup.stack, constants) if figure is None else figure.value


def _measured_first(times: BlockTimes, measured: MeasuredTimes) -> BlockTimes:
    """Return `times` with what was measured in place of what formulas say."""
    found = {name: np.where(np.isnan(known), getattr(times, name), known) for name, known in measured.items()}
    sides: dict[str, Any] = {name: known if known.ndim == 1 else tuple(known) for name, known in found.items()}
    return replace(times, **sides)


def _casts(setup: TrainingSetup, constants: Constants) -> float:
    if setup.workload.matmul_dtype == "float4":
        return constants["casts.float4"]
    if setup.workload.precision == "mxfp8":
        return constants["casts.mx"]
    # Scales of rows suit one of the two matmuls that a tensor goes to: it is cast again for the other.
    layouts = 2.0 if setup.workload.precision == "float8-rowwise" else 1.0
    return layouts * constants["casts.compiled" if setup.stack.kernels != "fused" else "casts.fused"]


def _sum_bytes(setup: TrainingSetup, constants: Constants) -> float:
    """Return the bytes that a microbatch moves to add a parameter's gradient to the sum; FSDP's: data_parallel.py."""
    stack = setup.stack
    if stack.sharding == "parameters":
        return 0.0
    element_bytes = BYTES_PER_ELEMENT[stack.gradient_accumulation_dtype]
    if not stack.fuses_gradient_sum:
        return 2 * element_bytes + 2 * _GRADIENT_BYTES
    return 2 * element_bytes * constants["accumulate"]


def _unfused(setup: TrainingSetup, constants: Constants) -> float:
    """Return the share of the passes around experts that their kernel does not do itself."""
    return constants["fused_experts"] if setup.stack.fused_experts else 1.0


def formula_launch_s(stack: Stack, constants: Constants) -> float:
    """Return the host's seconds for each kernel, where they were not measured."""
    name = "unfused" if stack.attention == "unfused" else stack.kernels
    share = 1.0 if stack.cuda_graphs == "none" else constants[f"graph_launches.{stack.cuda_graphs}"]
    return constants[f"launch_s.{name}"] * share


def _exchange_launches(setup: TrainingSetup, constants: Constants) -> float:
    name = "exchange_launches" if setup.stack.dispatcher == "fused" else "plain_exchange_launches"
    return constants[name]
