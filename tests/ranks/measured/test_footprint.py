"""The predicted peak of a step's memory against that of a step: FSDP2, recomputation and accumulation on one rank."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import footprint
from meshwright.cost.stack_factors import load_stack
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.hardware.catalogue import load_cluster
from meshwright.models.build import build_architecture
from meshwright.parallelism.apply import parallelize
from meshwright.parallelism.data.fully_sharded import TORCH_DTYPES
from meshwright.parallelism.data.materialize import materialize_stages
from meshwright.parallelism.losses.loss import make_loss
from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.pipeline.pipeline import Pipeline
from meshwright.parallelism.pipeline.stage_input import StageInput
from meshwright.spec.job.sections import DType, OptimizerSection, PrecisionSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.step.workload import Precision, Workload
from meshwright.trainer.optimizer.optimizer import build_optimizer
from run_ranks import run_ranks

SEQ_LEN = 128
SIZES = {
    "vocab_size": 256,
    "dim": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "ffn_dim": 352,
    "rope_theta": 10_000.0,
    "max_seq_len": 4096,
}
Case = tuple[dict[str, Any], Layout, int]
"""What differs from SIZES, the layout, and the microbatches of a step."""
WITHOUT_FSDP: list[Case] = [({"vocab_size": 4096}, Layout(microbatch_size=2), count) for count in (1, 3)]
"""In float32, which a processor computes without FSDP2 where nothing is shared."""
CASES: list[Case] = [
    ({}, Layout(microbatch_size=4), 1),
    ({}, Layout(activation_checkpoint="selective", microbatch_size=4), 1),
    ({}, Layout(activation_checkpoint="full", microbatch_size=4), 2),
    ({"vocab_size": 4096}, Layout(activation_checkpoint="full", microbatch_size=4), 1),
    ({}, Layout(activation_checkpoint="full", reshard_after_forward="never"), 1),
    ({"vocab_size": 4096}, Layout(activation_checkpoint="full", microbatch_size=4, loss_chunks=8), 1),
]


class _Peak(TorchDispatchMode):
    """Follows the bytes of all tensors that ops have read or made, and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def note(self, tensor: Tensor) -> None:
        local: Tensor = getattr(tensor, "_local_tensor", tensor)
        reference = StorageWeakRef(local.untyped_storage())
        self._storages.setdefault(reference.cdata, reference)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        self.bytes = max(self.bytes, self._alive_bytes())
        return result

    def _alive_bytes(self) -> int:
        total = 0
        for key, reference in list(self._storages.items()):
            # Its size now: FSDP2 frees what it has gathered by making it empty.
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


def _measured_bytes(case: Case, compute: DType = "bfloat16") -> int:
    """Return the peak of a step after the first, which makes the optimizer's state."""
    sizes, layout, num_microbatches = case
    architecture = LlamaArchitecture(**SIZES | sizes)
    with torch.device("meta"):
        model = build_architecture(architecture)
    schedule, meshes = build_schedule(layout, num_microbatches), build_meshes(layout, "cpu")
    precision = PrecisionSection(compute=compute, reduce="float32")
    stages = parallelize(model, meshes, precision, schedule, SEQ_LEN)
    materialize_stages(stages, meshes, seed=0)
    pipeline = Pipeline(stages, schedule, make_loss(model, meshes, stages.last), meshes, TORCH_DTYPES[compute])
    optimizer = build_optimizer(stages, OptimizerSection(learning_rate=1e-3))
    tokens_BS = torch.randint(0, architecture.vocab_size, (layout.microbatch_size, SEQ_LEN))
    context = {"positions_S": torch.arange(SEQ_LEN), "documents_BS": None}
    peak = _Peak()
    for mode in (None, peak):
        microbatches = [StageInput(tokens_BS, tokens_BS, context, lambda: None)] * num_microbatches
        if mode is None:
            pipeline.step(microbatches)
        else:
            gc.collect()
            states = [value for each in stages.parameters() for value in optimizer.state_of(each).values()]
            for tensor in (*stages.parameters(), *states):
                peak.note(tensor)
            with peak:
                pipeline.step(microbatches)
        optimizer.step()
        optimizer.zero_grad()
    return peak.bytes


def _predicted_bytes(case: Case, precision: Precision = "bfloat16") -> float:
    sizes, layout, num_microbatches = case
    setup = TrainingSetup(
        model_spec(LlamaArchitecture(**SIZES | sizes)),
        Workload(seq_len=SEQ_LEN, global_batch_size=num_microbatches * layout.microbatch_size, precision=precision),
        load_cluster("cpu-local"),
        load_stack("meshwright"),
    )
    return float(footprint(Configurations.of_one(setup, layout_table([layout]))).allocated_bytes[0])


def _measure_all(cases: list[int]) -> list[int]:
    return [_measured_bytes(CASES[case]) for case in cases]


def _measure_in_float32() -> list[int]:
    return [_measured_bytes(case, "float32") for case in WITHOUT_FSDP]


def test_peak_without_fsdp_is_the_predicted_one() -> None:
    (measured,) = run_ranks(_measure_in_float32, 1)
    predicted = [_predicted_bytes(case, "float32") for case in WITHOUT_FSDP]
    errors = [bytes_ / peak - 1 for bytes_, peak in zip(predicted, measured, strict=True)]
    assert errors == pytest.approx([0.0] * len(measured), abs=0.1)


@pytest.mark.parametrize("cases", [[0, 2, 5], pytest.param([1, 3, 4], marks=pytest.mark.long)])
def test_peak_of_a_step_is_the_predicted_one(cases: list[int]) -> None:
    (measured,) = run_ranks(_measure_all, 1, cases)
    errors = [_predicted_bytes(CASES[case]) / peak - 1 for case, peak in zip(cases, measured, strict=True)]
    assert errors == pytest.approx([0.0] * len(cases), abs=0.1)
