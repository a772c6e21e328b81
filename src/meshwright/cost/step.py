"""StepPricer: seconds of one optimizer step, from the physical floor up, of many configurations at once.

    microbatch = sum over blocks (matmul + attention + memory [+ recompute] + exposed tp, cp, ep), or the host if longer
    fsdp       = max(block, gathers and scatters) + slowdown x the shorter of the two (ours: while the device computes)
    step       = microbatches x slowest stage + bubble + exposed sends
                 + last gradients + optimizer + fixed host work, all x straggling

One op list (work.py) is priced cause by cause (block_time.py, block_compute.py, exposed_traffic.py,
data_parallel.py); this page adds the causes up. It holds for devices, next to which the host launches
kernels; cost/host overrides what differs where kernels run on the host itself. Ignored: that stages
differ in more than their number of blocks (replay_s prices the finalists exactly).
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from meshwright.cost.achieved_rates import peaks_of, rates_of
from meshwright.cost.blocks.block_positions import BlockPosition, block_positions
from meshwright.cost.blocks.block_table import BLOCK, FIRST, LAST
from meshwright.cost.blocks.work import work_of
from meshwright.cost.communication.communication import Communication
from meshwright.cost.communication.contention import computing_shares
from meshwright.cost.communication.data_parallel import (
    DataParallel,
    exposed_update_s,
    replicated_sums_s,
    sums_of_numbers_s,
)
from meshwright.cost.communication.exposed_traffic import ExposedTraffic, TrafficPricer
from meshwright.cost.communication.fabric import Fabric, FabricConstants, fabric_of, stack_fabrics
from meshwright.cost.communication.fsdp_copies import FsdpCopies
from meshwright.cost.communication.fsdp_ends import ends_exposed_s, pass_ends_exposed_s
from meshwright.cost.communication.fsdp_exposed import UnitPasses, fsdp_exposed_s
from meshwright.cost.communication.pipeline_p2p import PipelineP2P
from meshwright.cost.compute.block_compute import Computed, ComputePricer, Prices
from meshwright.cost.compute.block_time import BlockPricer
from meshwright.cost.compute.recompute import repeated_share
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Floats, Passes
from meshwright.cost.memory.activation_copies import ActivationCopies
from meshwright.cost.memory.managed_memory import ManagedMemory
from meshwright.cost.optimizer_update import UpdateCost
from meshwright.cost.pipeline.stage import RankPass, blocks_per_rank, bubble_share
from meshwright.cost.stack_factors import StackFactors, stacks_of
from meshwright.cost.training_setup import Configurations
from meshwright.spec.step.estimate import StepDecomposition


@dataclass(frozen=True)
class StepTerms:
    """Seconds by cause, one element a configuration; the fields are those of StepDecomposition."""

    model_flops_at_peak_s: Floats
    gemm_inefficiency_s: Floats
    tile_and_wave_quantization_s: Floats
    attention_inefficiency_s: Floats
    memory_bound_ops_s: Floats
    cpu_bound_s: Floats
    recomputation_s: Floats
    repeated_backward_s: Floats
    tp_communication_s: Floats
    cp_communication_s: Floats
    ep_communication_s: Floats
    activation_copies_s: Floats
    dp_communication_s: Floats
    pipeline_p2p_s: Floats
    other_communication_s: Floats
    pipeline_bubble_s: Floats
    optimizer_s: Floats
    stragglers_s: Floats

    @property
    def total_s(self) -> Floats:
        """Return the whole steps."""
        return np.asarray(sum(getattr(self, field.name) for field in fields(self)))

    def decomposition(self, row: int) -> StepDecomposition:
        """Return the step of the configuration at `row`."""
        seconds = {field.name: max(0.0, float(getattr(self, field.name)[row])) for field in fields(self)}
        if not seconds["activation_copies_s"]:
            del seconds["activation_copies_s"]
        return StepDecomposition(**seconds)


class StepPricer:
    """Prices configurations again and again with other constants; what does not depend on them is computed once."""

    block_pricer, activation_copies, update_cost = BlockPricer, ActivationCopies, UpdateCost

    def __init__(self, configs: Configurations) -> None:
        self.configs, self.layouts = configs, configs.layouts
        setups = configs.setups
        self.work = work_of(configs)
        self.peaks = peaks_of(setups)
        self.pricer = self.block_pricer(self.work, setups, self.peaks)
        fabrics = [fabric_of(setup.cluster, FabricConstants()) for setup in setups]
        self.fabric = stack_fabrics(fabrics, configs.setup_index).limited(configs.layouts.communication_sms)
        self.stacks = stacks_of(configs)
        self.microbatches = configs.num_microbatches
        self.stage = blocks_per_rank(configs, self.work)
        self.communication = Communication(configs, self.work)
        self.p2p = PipelineP2P(configs, self.work)
        self.parallel = DataParallel(configs, self.work)
        self.positions = block_positions(self.work)
        self.repeated = repeated_share(configs)
        self.compute = ComputePricer(configs, self.parallel, self.stage.num_blocks)
        self.copies = FsdpCopies(self.parallel, self.positions)
        self.traffic = TrafficPricer(self.communication, self.parallel)
        self.activations = self.activation_copies(configs, self.stage.num_blocks)
        self.update = self.update_cost(configs, self.parallel)
        self.managed = ManagedMemory(configs, self.parallel, self.positions)
        self.doublings = np.maximum(np.log2(np.maximum(self.layouts.num_ranks, 1) / 8), 0)

    def use(self, fitted: StackFactors) -> None:
        """Take `fitted` in place of the stacks' own multipliers."""
        self.stacks = replace(self.stacks, fitted=fitted)

    def price(self, constants: Constants) -> StepTerms:
        """Return the step of each configuration by cause."""
        blocks, first, last = self.passes(constants)
        rates = rates_of(self.configs.setups, self.peaks, constants)
        rates16 = rates.memory[self.configs.setup_index], rates.matmul16[self.configs.setup_index]
        return self._step(blocks, first, last, self.stacks.slowed(self.fabric, constants), rates16, constants)

    def passes(self, constants: Constants) -> tuple[RankPass, RankPass, RankPass]:
        """Return one microbatch through all blocks, through the embedding, and through norm, head and loss."""
        found: dict[int, list[tuple[RankPass, Floats]]] = {BLOCK: [], FIRST: [], LAST: []}
        for position, one in self.block_passes(constants):
            found[position.kind].append((one, position.count))
        blocks = self._summed(found[BLOCK])
        num_blocks = sum(count for _, count in found[BLOCK])
        blocks = replace(blocks, dp=blocks.dp + blocks.first_dp / np.maximum(num_blocks, 1))
        return blocks, self._summed(found[FIRST]), self._summed(found[LAST])

    def block_passes(self, constants: Constants) -> list[tuple[BlockPosition, RankPass]]:
        """Return one microbatch through a single block of each position, in the order of the model."""
        rates = rates_of(self.configs.setups, self.peaks, constants)
        prices = Prices(
            constants=constants,
            slow=self.stacks.factors(constants),
            times=self.pricer.price(rates, constants),
            fabric=self.stacks.slowed(self.fabric, constants),
            memory_rate=rates.memory[self.configs.setup_index],
            matmul32_rate=rates.matmul32[self.configs.setup_index],
        )
        return [(position, self._block_pass(position, prices)) for position in self.positions]

    def _summed(self, parts: list[tuple[RankPass, Floats]]) -> RankPass:
        total = RankPass(*(np.zeros(len(self.configs)) for _ in fields(RankPass)))
        for one, count in parts:
            total = total + one * count
        return total

    def _block_pass(self, position: BlockPosition, prices: Prices) -> RankPass:
        """Return one block's passes for one microbatch, forward and backward together."""
        row, times, c = position.row, prices.times, prices.constants
        block, copies = self.compute.at(position, prices), self._copies_s(position, prices)
        sending = self.compute.sending(position, block, times)
        sent = self.traffic.sent_alone(sending, prices.fabric, c)
        waits = self._waits(block, sent, c)
        # Of our own software copies hide communication, too: multipliers of other software were fitted without.
        copies_hide = np.where(self.parallel.is_own, 1.0, 0.0)
        busy = block.forward + copies_hide * copies[0], block.backward + copies_hide * copies[1]
        whole = busy[0] + sent.forward + waits[0], busy[1] + sent.backward + waits[1]
        dp, first_dp = self._fsdp_s(position, prices, busy, whole)
        if position.kind == BLOCK and self.traffic.contends.any():
            attention = (
                block.attention[0] + block.merges[0] + sent.cp[0],
                block.attention[1] + block.merges[1] + sent.cp[1],
            )
            sent = self.traffic.sent_next_to_fsdp(sending, prices.fabric, c, whole, attention)
            waits = self._waits(block, sent, c)
        copied = self.activations.exposed_s(position, whole)
        return RankPass(
            ideal_matmul=3 * times.ideal_matmul[row] - times.needless_matmul[row],
            ideal_attention=3 * times.ideal_attention[row] * self.compute.split_attention.kept_share(row),
            reached=times.reached_matmul[row] * prices.slow.compute,
            matmul=block.matmul[0] + block.matmul[1],
            attention=block.attention[0] + block.attention[1],
            memory=block.memory[0] + block.memory[1] + copies[0] + copies[1],
            host=waits[0] + waits[1],
            recompute=block.recompute,
            repeat=block.repeat,
            tp=sent.tp[0] + sent.tp[1],
            cp=sent.cp[0] + sent.cp[1],
            ep=sent.ep[0] + sent.ep[1],
            dp=dp,
            first_dp=first_dp,
            activation_copies=copied[0] + copied[1],
            copies_back=copied[1],
        )

    def _copies_s(self, position: BlockPosition, prices: Prices) -> Passes:
        """Return the seconds of what FSDP computes for a position, forward and backward."""
        return self.copies.at(position, prices.memory_rate, prices.slow, prices.constants["kernel_s"])

    def _fsdp_s(self, position: BlockPosition, prices: Prices, busy: Passes, whole: Passes) -> tuple[Floats, Floats]:
        """Return the exposed seconds that FSDP adds to a position's passes, and those that it adds to a first block's.

        Of the `whole` passes the device computes for `busy`.
        """
        fabric, c = prices.fabric, prices.constants
        prepared_s = self.copies.before_gather_s(position, prices.memory_rate, prices.slow)
        if position.kind != BLOCK:
            return ends_exposed_s(self.parallel, position.row, fabric, prepared_s), np.zeros(len(self.configs))
        added_s = self.copies.after_reduction_s(position, prices.memory_rate, prices.slow, c["kernel_s"])
        passes = UnitPasses(whole, computing_shares(self.parallel, busy, whole), prepared_s, added_s)
        ends = self.copies.before_blocks(prices.times, prices.memory_rate)
        return (
            fsdp_exposed_s(self.parallel, position.row, fabric, c, passes),
            pass_ends_exposed_s(self.parallel, position.row, fabric, c, passes, ends),
        )

    def _waits(self, block: Computed, sent: ExposedTraffic, c: Constants) -> Passes:
        """Return for how long the device waits for the host in both passes.

        Of our own kernels all are counted, and wait in a queue: the device is idle for what the host needs longer, less
        what it is ahead by since the forward. The exponent of other software was fitted with its kernels.
        """
        device = block.forward + sent.forward, block.backward + sent.backward
        ahead_s = np.maximum(device[0] - block.host[0], 0.0)
        queued = np.maximum(block.host[0] - device[0], 0.0), np.maximum(block.host[1] - device[1] - ahead_s, 0.0)
        forward, backward = (
            np.where(self.parallel.is_own, own_s, _longer_by_s(device_s, host_s, c["host_sharpness"]))
            for own_s, device_s, host_s in zip(queued, device, block.host, strict=True)
        )
        return forward, backward

    def _exchanges_s(self, fabric: Fabric, c: Constants, hidden_behind_s: Floats) -> Floats:
        """Return the exposed seconds of parameters and gradients outside of a steady microbatch."""
        return exposed_update_s(self.parallel, fabric, c, hidden_behind_s)

    def _sums_of_numbers_s(self, fabric: Fabric) -> Floats:
        """Return the seconds in which all ranks sum the loss and the norm of the gradients; 0 of other software."""
        # A calibration of other software has them in its fixed work of a step.
        return np.where(self.parallel.is_own, sums_of_numbers_s(self.layouts, fabric), 0.0)

    def host_as_memory_ops_s(self, passes: RankPass) -> Floats:
        """Return what of the host's own seconds in `passes` a step counts as memory-bound ops."""
        return np.zeros(len(self.configs))

    def _fixed_s(self, c: Constants) -> Floats:
        """Return the seconds of the host's fixed work of a step."""
        return c["step_s"] * self.stacks.factors(c).overhead

    def _optimizer_s(self, rates: Passes, c: Constants) -> Floats:
        """Return the seconds of the update; `rates` are the memory's and those of matmuls in 16 bits."""
        slow, is_own = self.stacks.factors(c), self.parallel.is_own
        # Of our own kernels all bytes are counted; three measured updates (validation/gpu_runs.csv) took what these do
        # at the memory's rate, or 5 % more.
        passes = np.where(is_own, 1.0, c["optimizer_passes"])
        moved = self.update.elementwise_s(rates[0], passes) * slow.overhead
        kernels = c["kernel_s"] * self.update.num_kernels * slow.overhead
        # Rates of our matmuls count on the factor of those of blocks.
        orthogonal = self.update.matmul_s(rates[1]) * np.where(is_own, slow.compute, 1.0)
        return self.managed.update_s(moved, self.update) + orthogonal + kernels

    def _step(
        self, blocks: RankPass, first: RankPass, last: RankPass, fabric: Fabric, rates: Passes, c: Constants
    ) -> StepTerms:
        """Return the terms of a step; `rates` are the memory's and those of matmuls in 16 bits."""
        pp, n = self.layouts.pp, self.microbatches
        mean = (blocks + first + last) * (1.0 / pp)
        slowest = self.stage.slowest_s(blocks.total, first.total, last.total)
        bubble = bubble_share(self.layouts, n, self.repeated) * mean.total
        imbalance = n * np.maximum(slowest - mean.total, 0.0)
        sends = self.p2p.exposed_s(fabric, c, n)
        exchanges = self._exchanges_s(fabric, c, slowest + bubble)
        optimizer = self._optimizer_s(rates, c)
        of_tp, of_fsdp = self.update.exchange_s(fabric)
        steady = mean * n
        straggling = c["straggling"] * self.doublings * (steady.total + imbalance + bubble + sends)
        return StepTerms(
            model_flops_at_peak_s=steady.ideal_matmul + steady.ideal_attention,
            gemm_inefficiency_s=steady.reached - steady.ideal_matmul,
            tile_and_wave_quantization_s=steady.matmul - steady.reached,
            attention_inefficiency_s=steady.attention - steady.ideal_attention,
            memory_bound_ops_s=steady.memory + self.managed.cast_s,
            cpu_bound_s=steady.host + self._fixed_s(c),
            recomputation_s=steady.recompute,
            repeated_backward_s=steady.repeat,
            tp_communication_s=steady.tp + replicated_sums_s(self.parallel, fabric) + of_tp,
            cp_communication_s=steady.cp,
            ep_communication_s=steady.ep,
            activation_copies_s=steady.activation_copies,
            dp_communication_s=steady.dp + exchanges + of_fsdp + self.managed.gather_s,
            pipeline_p2p_s=sends,
            other_communication_s=self._sums_of_numbers_s(fabric) + self.managed.start_s,
            pipeline_bubble_s=imbalance + bubble,
            optimizer_s=optimizer,
            stragglers_s=straggling,
        )


def _longer_by_s(device_s: Floats, host_s: Floats, sharpness: float) -> Floats:
    """Return the seconds that `host_s` add to `device_s`, in a smooth form of the longer of the two."""
    return np.asarray((device_s**sharpness + host_s**sharpness) ** (1 / sharpness)) - device_s
