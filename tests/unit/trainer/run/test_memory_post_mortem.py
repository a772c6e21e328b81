"""The message of a rank that ran out of memory: which errors count, the table by tensor class, the key to change."""

from __future__ import annotations

import pytest
import torch

from meshwright.planner.explain.memory_advice import MemoryAdvice, SmallerLayout
from meshwright.spec.step.estimate import MemoryUse
from meshwright.trainer.run.memory_post_mortem import (
    MemoryByClass,
    asked_bytes,
    by_class,
    change_line,
    is_out_of_memory,
    table_lines,
)
from meshwright.units import GiB, MiB

OF_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "2097152 bytes. Error code 12 (Cannot allocate memory)"
)
OF_CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")
PREDICTED = MemoryUse(
    parameters_bytes=4 * MiB,
    gradients_bytes=4 * MiB,
    optimizer_state_bytes=8 * MiB,
    unsharded_parameters_bytes=2 * MiB,
    activations_bytes=16 * MiB,
    logits_bytes=3 * MiB,
    communication_buffers_bytes=1 * MiB,
    workspace_bytes=1 * MiB,
    fragmentation_bytes=2 * MiB,
)


@pytest.mark.parametrize(
    ("error", "num_bytes"), [(OF_CPU, 2 * MiB), (OF_CUDA, 2.5 * GiB), (MemoryError("Unable to allocate 1.0 GiB"), 0)]
)
def test_a_failed_allocation_is_recognised_with_the_bytes_that_it_asked_for(
    error: BaseException, num_bytes: float
) -> None:
    assert is_out_of_memory(error)
    assert asked_bytes(error) == num_bytes


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("can't allocate memory")])
def test_other_errors_are_none(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_every_byte_of_the_prediction_is_in_a_class() -> None:
    classes = by_class(PREDICTED)
    assert classes.activations == 20 * MiB
    assert classes.communication == 3 * MiB
    assert sum(vars(classes).values()) == PREDICTED.device_bytes


def test_the_table_compares_class_by_class_and_in_all() -> None:
    present = MemoryByClass(parameters=4 * MiB, gradients=1 * MiB, activations=30 * MiB, buffers=MiB)
    head, *rows = (line.split() for line in table_lines(by_class(PREDICTED), present))
    assert head == ["predicted", "present", "difference"]
    assert rows[0] == ["parameters", "4", "MiB", "4", "MiB", "+0", "B"]
    assert rows[1] == ["gradients", "4", "MiB", "1", "MiB", "-3", "MiB"]
    assert rows[3] == ["activations", "20", "MiB", "30", "MiB", "+10", "MiB"]
    assert rows[-1] == ["total", "41", "MiB", "36", "MiB", "-5", "MiB"]


def test_what_is_not_known_is_a_dash() -> None:
    _, parameters, *_ = (line.split() for line in table_lines(None, MemoryByClass(parameters=MiB)))
    assert parameters == ["parameters", "-", "1", "MiB", "-"]


def test_the_last_line_names_the_key_or_says_that_none_is_enough() -> None:
    advice = MemoryAdvice(rank=PREDICTED, memory_bytes=41.0 * MiB, step_s=1.0)
    assert change_line(advice).startswith("no single key of [layout] is predicted to free enough of 41 MiB")
    smaller = SmallerLayout(change="activation_checkpoint=full", memory_bytes=20.0 * MiB, step_s=1.5)
    assert change_line(advice.replace(smaller=smaller)) == (
        "set layout.activation_checkpoint=full: predicted to take 20 MiB and 1.5 s a step in place of 41 MiB and 1 s "
        "a step"
    )
    present = MemoryByClass(parameters=4 * MiB, unaccounted=102 * MiB)
    assert change_line(advice.replace(smaller=smaller), present).endswith(
        "take 120 MiB and 1.5 s a step in place of 141 MiB and 1 s a step, what is unaccounted included"
    )
