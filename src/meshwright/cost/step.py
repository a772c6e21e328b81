"""step_times: seconds of one optimizer step, from the physical floor up, of many cases at once.

    microbatch = sum over blocks (matmul + attention + memory [+ recompute] + exposed tp, cp, ep), or the host if longer
    fsdp       = max(block, gathers and scatters) + slowdown x the shorter of the two
    step       = microbatches x slowest stage + bubble + exposed sends
                 + last gradients + optimizer + fixed host work, all x straggling

One op list (work.py) is priced cause by cause (block_time.py); this page puts the causes together and names what each
adds. Ignored: that stages differ in more than their number of blocks (replay_s prices the finalists exactly).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from meshwright.cost.block_time import BlockPricer, BlockTimes
from meshwright.cost.case import Cases, Floats
from meshwright.cost.communication import Communication, communication_of
from meshwright.cost.constants import Constants, fitted_constants
from meshwright.cost.contention import computing_shares
from meshwright.cost.context_attention import ContextAttention, context_attention_of
from meshwright.cost.data_parallel import (
    DataParallel,
    data_parallel_of,
    ends_exposed_s,
    exposed_update_s,
    first_block_exposed_s,
    fsdp_exposed_s,
    replicated_sums_s,
)
from meshwright.cost.fabric import Fabric, FabricConstants, fabric_of, stack_fabrics
from meshwright.cost.fsdp_copies import FsdpCopies
from meshwright.cost.measured_op import measured_update_s
from meshwright.cost.measured_sharding import measured_exchanges_s
from meshwright.cost.messages import Messages, messages_of
from meshwright.cost.own_kernels import position_kernels
from meshwright.cost.rank_pass import RankPass
from meshwright.cost.rates import peaks_of, rates_of
from meshwright.cost.recompute import Recomputed, recomputed_of
from meshwright.cost.sent import Again, Passes, Sending, Sent, senders_of
from meshwright.cost.sequence_copies import sequence_copies
from meshwright.cost.slots import Slot, slots_of
from meshwright.cost.slowness import Slowness, Stacks, stacks_of
from meshwright.cost.stage import Stages, bubble_share, recompute_passes, repeated_share, stages_of
from meshwright.cost.work import BLOCK, FIRST, LAST, Ints, work_of
from meshwright.spec.estimate import StepTime

_OPTIMIZER_BYTES = 32.0
"""Read and written for each parameter by AdamW with float32 masters: gradient, master, two moments, the new copy."""


@dataclass(frozen=True)
class StepTerms:
    """Seconds by cause, one element a case; the fields are those of StepTime."""

    floor_s: Floats
    matmul_s: Floats
    tile_s: Floats
    attention_s: Floats
    memory_s: Floats
    host_s: Floats
    recompute_s: Floats
    repeat_s: Floats
    tp_s: Floats
    cp_s: Floats
    ep_s: Floats
    dp_s: Floats
    pp_s: Floats
    bubble_s: Floats
    optimizer_s: Floats
    jitter_s: Floats

    @property
    def total_s(self) -> Floats:
        """Return the whole steps."""
        return np.asarray(sum(getattr(self, field.name) for field in fields(self)))

    def step_time(self, row: int) -> StepTime:
        """Return the case at `row` as the noun."""
        return StepTime(**{field.name: max(0.0, float(getattr(self, field.name)[row])) for field in fields(self)})


def step_times(cases: Cases, constants: Constants | None = None) -> StepTerms:
    """Return the step of each case by cause, with the fitted constants unless others are given."""
    return StepPricer(cases).price(fitted_constants() if constants is None else constants)


_NOTHING = Recomputed(*(np.zeros(1) for _ in fields(Recomputed)))


class StepPricer:
    """Prices the same cases again and again with other constants; what does not depend on them is computed once."""

    def __init__(self, cases: Cases) -> None:
        self.cases, self.layouts = cases, cases.layouts
        settings = cases.settings
        self.work = work_of(cases)
        self.peaks = peaks_of(settings)
        self.pricer = BlockPricer(self.work, settings, self.peaks)
        fabrics = [fabric_of(setting.cluster, FabricConstants()) for setting in settings]
        self.fabric = stack_fabrics(fabrics, cases.setting)
        self.stacks: Stacks = stacks_of(cases)
        self.microbatches = cases.num_microbatches
        self.stage: Stages = stages_of(cases, self.work)
        self.communication: Communication = communication_of(cases, self.work)
        self.messages: Messages = messages_of(cases, self.work)
        self.split_attention: ContextAttention = context_attention_of(cases, self.work.owners)
        self.parallel: DataParallel = data_parallel_of(cases, self.work)
        self.slots = slots_of(self.work)
        self.recomputed: Recomputed = recomputed_of(cases)
        self.wide_bytes = cases.each(lambda s: s.workload.activation_element_bytes)
        self.gradient_bytes = cases.each(lambda s: s.stack.gradient_bytes)
        self.recompute_passes = recompute_passes(self.layouts, self.microbatches)
        self.repeated = repeated_share(cases)
        """Share of blocks' backwards that run twice: experts and rings that stay eager are taken for compiled, too."""
        self.is_host = cases.each(lambda s: float(s.cluster.device.is_host)) > 0
        self.copies = FsdpCopies(self.parallel, self.stacks, self.slots, self.is_host)
        self.senders = senders_of(self.communication, self.parallel, self.is_host)
        self.update_s = measured_update_s(cases, self.parallel.updated)
        self.doublings = np.maximum(np.log2(np.maximum(self.layouts.num_ranks, 1) / 8), 0)

    def use(self, fitted: Slowness) -> None:
        """Take `fitted` in place of the stacks' own multipliers."""
        self.stacks = replace(self.stacks, fitted=fitted)
        self.copies = replace(self.copies, stacks=self.stacks)

    def price(self, constants: Constants) -> StepTerms:
        """Return the step of each case by cause."""
        blocks, first, last = self.passes(constants)
        memory_rate = rates_of(self.cases.settings, self.peaks, constants).memory[self.cases.setting]
        return self._step(blocks, first, last, self.stacks.slowed(self.fabric, constants), memory_rate, constants)

    def passes(self, constants: Constants) -> tuple[RankPass, RankPass, RankPass]:
        """Return one microbatch through all blocks, through the embedding, and through norm, head and loss."""
        found: dict[int, list[tuple[RankPass, Floats]]] = {BLOCK: [], FIRST: [], LAST: []}
        for slot, one in self.slot_passes(constants):
            found[slot.kind].append((one, slot.count))
        blocks = self._summed(found[BLOCK])
        num_blocks = sum(count for _, count in found[BLOCK])
        blocks = replace(blocks, dp=blocks.dp + blocks.first_dp / np.maximum(num_blocks, 1))
        return blocks, self._summed(found[FIRST]), self._summed(found[LAST])

    def slot_passes(self, constants: Constants) -> list[tuple[Slot, RankPass]]:
        """Return one microbatch through a single block of each slot, in the order of the model."""
        rates = rates_of(self.cases.settings, self.peaks, constants)
        times = self.pricer.price(rates, constants)
        fabric = self.stacks.slowed(self.fabric, constants)
        memory_rate = rates.memory[self.cases.setting]
        return [(slot, self._block(slot, times, fabric, memory_rate, constants)) for slot in self.slots]

    def _summed(self, parts: list[tuple[RankPass, Floats]]) -> RankPass:
        total = RankPass(*(np.zeros(len(self.cases)) for _ in fields(RankPass)))
        for one, count in parts:
            total = total + one * count
        return total

    def _block(self, slot: Slot, times: BlockTimes, fabric: Fabric, memory_rate: Floats, c: Constants) -> RankPass:
        """Return one block's passes for one microbatch, forward and backward together."""
        owner, slow = slot.owner, self.stacks.slowness(c)
        mm_f, mm_b = (side[owner] * slow.compute for side in times.matmul)
        in_pieces = self.split_attention.slowdown(owner, c)
        att_f, att_b = (side[owner] * slow.compute * in_pieces for side in times.attention)
        slower = slow.compute * slow.overhead
        mem_f, mem_b = (side[owner] * slower for side in times.memory)
        merge_f, merge_b = self._merges_s(owner, memory_rate, c)
        mem_b = mem_b + merge_b
        host_f, host_b = (side[owner] * slow.overhead for side in times.host)
        again = self.recomputed if slot.kind == BLOCK else _NOTHING
        owners, passes = self.work.owners, self.recompute_passes
        last_share, second_share = owners.last_matmul_share[owner], owners.second_matmuls_share[owner]
        mm_again = passes * again.of_matmuls(last_share, second_share, owners.early_terms_share[owner])
        attended = again.collectives * passes
        rec = mm_again * mm_f + passes * (again.attention * att_f + again.memory * mem_f) + attended * merge_f
        copied = sequence_copies(owners, owner, self.layouts, again, self.parallel.is_own)
        copied_f, copied_b, copied_again = (moved * self.wide_bytes / memory_rate * slower for moved in copied)
        rec = rec + passes * copied_again
        starts = c["kernel_s"] * position_kernels(owners, owner, self.layouts, self.stage.num_blocks)
        mem_f = mem_f + merge_f + copied_f + np.where(self.parallel.is_own & ~self.is_host, starts * slower, 0.0)
        mem_b = mem_b + copied_b
        twice = self.repeated * (slot.kind == BLOCK)
        repeat = twice * (mm_b + att_b + mem_b)
        computed = (mm_f + att_f + mem_f, mm_b + att_b + mem_b + repeat + rec)
        host = (host_f, (1 + twice) * host_b + mm_again * host_f)
        tp_again = passes * again.of_collectives(owners.num_tp_collectives[owner], last_share)
        sending = Sending(owner, mm_f, (att_f, att_b), twice, Again(tp_again, attended, again.exchanges * passes))
        sent = self.senders.sent_alone(sending, fabric, c)
        waits = self._waits(computed, sent, host, c)
        copies = self.copies.of_slot(slot, memory_rate, c)
        # Of our own software copies hide communication, too: multipliers of other software were fitted without.
        copies_hide = np.where(self.parallel.is_own, 1.0, 0.0)
        hiding = computed[0] + copies_hide * copies[0], computed[1] + copies_hide * copies[1]
        whole_pass = hiding[0] + sent.forward + waits[0], hiding[1] + sent.backward + waits[1]
        if slot.kind == BLOCK:
            dp = fsdp_exposed_s(
                self.parallel, owner, fabric, c, whole_pass, computing_shares(self.parallel, hiding, whole_pass)
            )
            ends = self.copies.before_blocks(times, memory_rate)
            first_dp = first_block_exposed_s(self.parallel, owner, fabric, c, whole_pass, ends)
            if self.senders.contends.any():
                attention = att_f + merge_f + sent.cp[0], att_b + merge_b + sent.cp[1]
                sent = self.senders.sent_beside_fsdp(sending, fabric, c, whole_pass, attention)
                waits = self._waits(computed, sent, host, c)
        else:
            dp = ends_exposed_s(self.parallel, owner, fabric)
            first_dp = np.zeros(len(self.cases))
        dp, first_dp = (np.where(self.is_host, 0.0, seconds) for seconds in (dp, first_dp))
        return RankPass(
            ideal_matmul=3 * times.ideal_matmul[owner],
            ideal_attention=3 * times.ideal_attention[owner],
            reached=3 * times.reached_matmul[owner] * slow.compute,
            matmul=mm_f + mm_b,
            attention=att_f + att_b,
            memory=mem_f + mem_b + copies[0] + copies[1],
            host=waits[0] + waits[1],
            recompute=rec,
            repeat=repeat,
            tp=sent.tp[0] + sent.tp[1],
            cp=sent.cp[0] + sent.cp[1],
            ep=sent.ep[0] + sent.ep[1],
            dp=dp,
            first_dp=first_dp,
        )

    def _waits(self, computed: Passes, sent: Sent, host: Passes, c: Constants) -> Passes:
        """Return for how long the device waits for the host in both passes."""

        def wait_s(device_s: Floats, host_s: Floats) -> Floats:
            return np.where(self.is_host, host_s, _longer(device_s, host_s, c["host_sharpness"]) - device_s)

        return wait_s(computed[0] + sent.forward, host[0]), wait_s(computed[1] + sent.backward, host[1])

    def _merges_s(self, owner: Ints, memory_rate: Floats, c: Constants) -> tuple[Floats, Floats]:
        """Return the seconds that attention of a split sequence takes besides its kernels, forward and backward."""
        slow, split = self.stacks.slowness(c), self.split_attention
        forward, backward = (
            (num_bytes / memory_rate + c["kernel_s"] * num_kernels) * slow.compute * slow.overhead
            for num_bytes, num_kernels in zip(split.moved_bytes(owner), split.kernels(), strict=True)
        )
        has_attention = self.work.owners.attention_flops[owner] > 0
        return forward * has_attention, backward * has_attention

    def _step(
        self, blocks: RankPass, first: RankPass, last: RankPass, fabric: Fabric, memory_rate: Floats, c: Constants
    ) -> StepTerms:
        pp, n = self.layouts.pp, self.microbatches
        mean = (blocks + first + last) * (1.0 / pp)
        slowest = self.stage.slowest_s(blocks.total, first.total, last.total)
        bubble = bubble_share(self.layouts, n, self.repeated) * mean.total
        imbalance = n * np.maximum(slowest - mean.total, 0.0)
        sends = self.messages.exposed_s(fabric, c, n)
        update = exposed_update_s(self.parallel, fabric, c, slowest + bubble)
        if self.is_host.any():
            update = np.where(self.is_host, measured_exchanges_s(self.parallel, self.slots, fabric), update)
        overhead = self.stacks.slowness(c).overhead
        updated_bytes = self.parallel.updated * (_OPTIMIZER_BYTES + self.gradient_bytes)
        optimizer = updated_bytes / memory_rate * c["optimizer_passes"]
        optimizer = np.where(np.isnan(self.update_s), optimizer, self.update_s) * overhead
        fixed = np.where(self.is_host, 0.0, c["step_s"] * overhead)
        steady = mean * n
        straggling = c["straggling"] * self.doublings * (steady.total + imbalance + bubble + sends)
        return StepTerms(
            floor_s=steady.ideal_matmul + steady.ideal_attention,
            matmul_s=steady.reached - steady.ideal_matmul,
            tile_s=steady.matmul - steady.reached,
            attention_s=steady.attention - steady.ideal_attention,
            memory_s=steady.memory,
            host_s=steady.host + fixed,
            recompute_s=steady.recompute,
            repeat_s=steady.repeat,
            tp_s=steady.tp + replicated_sums_s(self.parallel, fabric),
            cp_s=steady.cp,
            ep_s=steady.ep,
            dp_s=steady.dp + update,
            pp_s=sends,
            bubble_s=imbalance + bubble,
            optimizer_s=optimizer,
            jitter_s=straggling,
        )


def _longer(device: Floats, host: Floats, sharpness: float) -> Floats:
    return np.asarray((device**sharpness + host**sharpness) ** (1 / sharpness))
