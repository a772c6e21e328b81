"""Configurations to price: layouts with their model, workload, cluster and stack; Partition: one rank's tokens.

The planner has one setup and many layouts, a backtest a setup for every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable
from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.job.rules.attention_rules import cudnn_takes
from meshwright.spec.layout.attention_backend import SPARSE_BACKENDS, AttentionBackend
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.model.adapted_model import adapted_model
from meshwright.spec.model.model_spec import ModelSpec
from meshwright.spec.model.op import CoreAttention
from meshwright.spec.step.stack import Stack
from meshwright.spec.step.workload import BYTES_PER_ELEMENT, Workload


@dataclass(frozen=True)
class TrainingSetup:
    """Model, workload, cluster, software stack and attention's backend: what decides which kernels a step has."""

    model: ModelSpec
    workload: Workload
    cluster: Cluster
    stack: Stack
    attention_backend: AttentionBackend = "auto"
    """layout.attention_backend, of our own trainer."""
    memory: MemorySection = field(default_factory=MemorySection)
    """Which memory named uses take, of our own trainer."""

    @cached_property
    def trained_model(self) -> ModelSpec:
        """Return the model with its adapters, and what they freeze marked; the model itself without."""
        return adapted_model(self.model, self.workload.adapter)

    @property
    def is_own(self) -> bool:
        """Return whether the software is our own trainer, whose kernels and bytes are counted in traces."""
        return self.stack.eager_mixtures

    @property
    def is_own_on_device(self) -> bool:
        """Return whether our own trainer runs on an accelerator, where kernels run apart from the host."""
        return self.is_own and self.cluster.device.torch_type == "cuda"

    @property
    def is_low_precision(self) -> bool:
        """Return whether matmuls are computed in 8 or 4 bits."""
        return self.workload.matmul_dtype in ("float8", "float4")

    @property
    def masks_scores(self) -> bool:
        """Return whether attention computes scores between documents and masks them, as ours does. Variable-length
        kernels of other software skip them, and so do FlexAttention and varlen_attn.
        """
        return self.is_own and self.workload.masks_documents and not self.skips_masked

    @property
    def skips_masked(self) -> bool:
        """Return whether our trainer's attention skips scores that documents or a window hide. On a CPU flex is
        computed under a mask.
        """
        return self.attention_backend in SPARSE_BACKENDS and self.cluster.device.torch_type == "cuda"

    @property
    def takes_cudnn(self) -> bool:
        """Return whether cuDNN has a kernel for the model's heads and the format of activations."""
        cores = [op for group in self.model.groups for op in group.ops if isinstance(op, CoreAttention)]
        widths = {(op.head_dim, op.value_head_dim) for op in cores}
        return not self.has_wide_activations and all(cudnn_takes(*one) for one in widths)

    @property
    def has_wide_activations(self) -> bool:
        """Return whether activations have more than 16 bits, for which accelerators have no flash attention."""
        return self.workload.activation_element_bytes > BYTES_PER_ELEMENT["bfloat16"]

    @property
    def gathers_low(self) -> bool:
        """Return whether what ranks gather has been cast before: inputs and parameters of low-precision matmuls."""
        return self.stack.low_precision_gather and self.is_low_precision

    @property
    def pools_embedding(self) -> bool:
        """Return whether the embedding is in managed memory."""
        return self._has_managed_memory and self.memory.embedding == "uvm"

    @property
    def pools_optimizer_state(self) -> bool:
        """Return whether optimizer states are in managed memory."""
        return self._has_managed_memory and self.memory.optimizer_state == "uvm"

    @property
    def _has_managed_memory(self) -> bool:
        return self.is_own and self.cluster.device.has_own_memory

    @property
    def sums_in_place(self) -> bool:
        """Return whether our trainer sums gradients in place, not by FSDP2, where each rank holds the whole model: on a
        CPU, if it computes in the format of its parameters.
        """
        workload = self.workload
        is_wide = workload.activation_dtype == workload.gradient_dtype == workload.matmul_dtype == "float32"
        return self.is_own and self.cluster.device.torch_type == "cpu" and is_wide

    @property
    def own_float8(self) -> str:
        """Return the float8 precision of our own trainer; "" where the software or the precision is another."""
        return self.workload.precision if self.is_own and self.is_low_precision else ""

    @property
    def own_float8_experts(self) -> bool:
        """Return whether our own trainer computes experts in float8."""
        return bool(self.own_float8) and self.workload.float8_experts


@dataclass(frozen=True)
class Configurations:
    """Layouts, each in one of the setups."""

    setups: tuple[TrainingSetup, ...]
    setup_index: Ints
    """Position in `setups` of each layout's setup."""
    layouts: LayoutTable

    def __len__(self) -> int:
        return len(self.layouts)

    @classmethod
    def of_one(cls, setup: TrainingSetup, layouts: LayoutTable) -> Configurations:
        """Return all `layouts` in one setup."""
        return cls((setup,), np.zeros(len(layouts), np.int64), layouts)

    def take(self, rows: NDArray[Any]) -> Configurations:
        """Return the configurations at `rows` (positions or a mask)."""
        return Configurations(self.setups, self.setup_index[rows], self.layouts.take(rows))

    def each(self, value: Callable[[TrainingSetup], float]) -> Floats:
        """Return `value` of each configuration's setup, one float a configuration."""
        return np.array([value(setup) for setup in self.setups], np.float64)[self.setup_index]

    def has(self, is_true: Callable[[TrainingSetup], bool]) -> Bools:
        """Return whether a statement is true of each configuration's setup."""
        return np.array([is_true(setup) for setup in self.setups], np.bool_)[self.setup_index]

    @property
    def num_microbatches(self) -> Floats:
        """Return the microbatches that one data-parallel rank runs in a step."""
        batch = self.each(lambda setup: setup.workload.global_batch_size)
        return np.asarray(batch / (self.layouts.dp * self.layouts.microbatch_size), np.float64)


class Partition:
    """Tokens and degrees of one setup, one element a key; and what its stack does with them."""

    def __init__(self, setup: TrainingSetup, keys: LayoutTable) -> None:
        self.seq_len = setup.workload.seq_len
        self.document_tokens = setup.workload.document_tokens if setup.workload.masks_documents else None
        self.tp, self.ep, self.etp = keys.tp, keys.ep, keys.etp
        self.tokens = keys.microbatch_size * self.seq_len / keys.cp
        self.cp, self.loss_chunks = keys.cp, keys.loss_chunks
        self.tokens_between = self.tokens / keys.tp if setup.stack.sequence_parallel else self.tokens
        self.fuses = setup.stack.kernels == "fused"
        self.gathers_low = setup.gathers_low
        self.routes_in_float32 = setup.is_own
        has_own_ranks = (keys.ep > 1) | (keys.tp > 1)
        self.has_eager_experts = setup.is_own & ((setup.stack.kernels == "eager") | has_own_ranks)
        self.is_own, self.is_own_on_device = setup.is_own, setup.is_own_on_device
        self.own_float8 = setup.own_float8
        self.own_float8_experts = setup.own_float8_experts
        self.gathers_own_low = setup.own_float8 == "float8-tensorwise"
        """Whether our trainer gathers the weights of float8 matmuls in float8 (parallelism/float8)."""
        self.element_bytes = float(setup.workload.activation_element_bytes)
        self.compiles_blocks = setup.stack.kernels != "eager"
        self.compiles_only_networks = self.is_own & self.compiles_blocks & keys.has_eager_attention
        """Whether attention, norms and residual sums stay out of what is compiled (parallelism/compile_blocks.py)."""
        self.pairs_answers = setup.is_own & setup.workload.pairs_answers
        self.compiles_loss = setup.is_own & setup.stack.joins_loss
        self.gathers_routed_tokens = setup.stack.gathers_routed_tokens
