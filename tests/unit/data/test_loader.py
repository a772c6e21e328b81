import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.loader import Loader, Microbatch, stack
from meshwright.data.numbered_samples import Dataset, Sample
from meshwright.data.order import Share
from meshwright.errors import DataError


class Numbers(Dataset):
    """Sample i is ([i, i + 0.5], i)."""

    vocab_size = None

    def __init__(self, num_samples: int, validation_fraction: float = 0.0) -> None:
        super().__init__(num_samples, validation_fraction, {"content_hash": f"numbers {num_samples}"})
        self.reads: list[int] = []
        self.fails_at: int | None = None

    def read(self, index: int) -> Sample:
        if index == self.fails_at:
            raise OSError(f"no sample {index}")
        self.reads.append(index)
        return np.array([index, index + 0.5]), index


def targets_of(batches: list[Microbatch]) -> list[int]:
    return [int(target) for batch in batches for target in batch.targets]


def global_batch(num_samples: int, share: Share, step: int, **options: Any) -> list[int]:
    """The targets of one step over all ranks, by slot."""
    by_slot: dict[int, list[int]] = {}
    for rank in range(share.dp_degree):
        mine = Share(share.global_batch_size, share.microbatch_size, rank, share.dp_degree)
        loader = Loader(Numbers(num_samples), mine, seed=7, **options)
        for batch in loader.microbatches(step):
            by_slot[batch.first_slot] = targets_of([batch])
        loader.close()
    return [target for slot in sorted(by_slot) for target in by_slot[slot]]


@pytest.mark.slow
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    num_samples=st.integers(1, 60),
    step=st.integers(0, 20),
)
def test_samples_and_their_order_know_no_ranks(sizes: tuple[int, int, int], num_samples: int, step: int) -> None:
    dp_degree, microbatch_size, num_microbatches = sizes
    size = dp_degree * microbatch_size * num_microbatches
    one_rank = global_batch(num_samples, Share(size, size), step)
    assert global_batch(num_samples, Share(size, microbatch_size, 0, dp_degree), step) == one_rank


def test_resume_at_any_step_equals_never_stopping() -> None:
    share = Share(6, 3)
    straight = Loader(Numbers(20), share, seed=1)
    steps = [targets_of(straight.microbatches(step)) for step in range(12)]
    straight.close()
    for start in range(12):
        resumed = Loader(Numbers(20), share, seed=1)
        assert [targets_of(resumed.microbatches(step)) for step in range(start, 12)] == steps[start:]
        resumed.close()


def test_steps_may_be_asked_for_in_any_order() -> None:
    loader = Loader(Numbers(50), Share(4), seed=3)
    forward = {step: targets_of(loader.microbatches(step)) for step in range(5)}
    for step in (3, 0, 0, 4, 1):
        assert targets_of(loader.microbatches(step)) == forward[step]
    loader.close()


def test_epochs_wrap_exactly_and_are_shuffled_anew() -> None:
    # 10 samples in batches of 4: epochs end inside batches.
    loader = Loader(Numbers(10), Share(4, 2), seed=0)
    seen = [target for step in range(5) for target in targets_of(loader.microbatches(step))]
    loader.close()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_a_global_batch_may_be_larger_than_an_epoch() -> None:
    loader = Loader(Numbers(3), Share(8, 8), seed=0)
    seen = targets_of(loader.microbatches(0)) + targets_of(loader.microbatches(1))
    loader.close()
    assert [sorted(seen[i : i + 3]) for i in range(0, 15, 3)] == [[0, 1, 2]] * 5


def test_microbatches_are_stacked_along_a_new_first_dimension() -> None:
    loader = Loader(Numbers(9), Share(4, 2), seed=0, shuffle=False)
    first, second = loader.microbatches(0)
    loader.close()
    assert first.inputs.tolist() == [[0.0, 0.5], [1.0, 1.5]]
    assert first.inputs.dtype == torch.float64
    assert first.targets.tolist() == [0, 1]
    assert (first.first_slot, second.first_slot) == (0, 2)


def test_the_next_step_is_read_ahead_while_this_one_is_used() -> None:
    dataset = Numbers(100)
    arrived = threading.Event()
    original = dataset.read

    def read(index: int) -> Sample:
        if index == 7:
            arrived.set()
        return original(index)

    dataset.read = read  # type: ignore[method-assign]
    loader = Loader(dataset, Share(4), seed=0, shuffle=False)
    loader.microbatches(0)
    assert arrived.wait(10)
    loader.close()
    assert sorted(dataset.reads) == list(range(8))


def test_an_error_of_the_next_step_is_raised_when_that_step_is_asked_for() -> None:
    dataset = Numbers(100)
    dataset.fails_at = 5
    loader = Loader(dataset, Share(4), seed=0, shuffle=False)
    assert targets_of(loader.microbatches(0)) == [0, 1, 2, 3]
    with pytest.raises(OSError, match="no sample 5"):
        loader.microbatches(1)
    # The thread lives on, so a caller may go elsewhere.
    assert targets_of(loader.microbatches(2)) == [8, 9, 10, 11]
    loader.close()


def test_validation_takes_the_last_samples_in_their_own_order() -> None:
    dataset = Numbers(100, validation_fraction=0.1)
    loaders = [Loader(dataset, Share(4, 2, rank, 2), seed=rank) for rank in range(2)]
    batches = [[targets_of(loader.validation_microbatches(index)) for loader in loaders] for index in range(3)]
    for loader in loaders:
        loader.close()
    assert batches == [[[90, 91], [92, 93]], [[94, 95], [96, 97]], [[98, 99], [90, 91]]]


@pytest.mark.parametrize(("num_samples", "global_batch_size", "expected"), [(100, 4, 2), (10, 4, 1), (100, 10, 1)])
def test_validation_batches_without_repeats(num_samples: int, global_batch_size: int, expected: int) -> None:
    loader = Loader(Numbers(num_samples, 0.1), Share(global_batch_size), seed=0)
    assert loader.num_validation_batches == expected
    loader.close()


def test_one_thread_at_a_time_reads_samples() -> None:
    busy = threading.Lock()
    overlaps: list[int] = []

    class Slow(Numbers):
        def read(self, index: int) -> Sample:
            if not busy.acquire(blocking=False):
                overlaps.append(index)
                return super().read(index)
            time.sleep(0.01)
            busy.release()
            return super().read(index)

    loader = Loader(Slow(20, 0.2), Share(4), seed=0)
    loader.microbatches(0)
    loader.validation_microbatches(0)
    loader.microbatches(1)
    loader.close()
    assert not overlaps


def test_no_validation_samples_make_no_validation_batches() -> None:
    loader = Loader(Numbers(10), Share(2), seed=0)
    assert loader.num_validation_batches == 0
    loader.close()


def test_training_never_sees_a_validation_sample() -> None:
    loader = Loader(Numbers(30, validation_fraction=0.2), Share(6), seed=0)
    seen = {target for step in range(8) for target in targets_of(loader.microbatches(step))}
    loader.close()
    assert seen == set(range(24))


def test_samples_of_different_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"inputs of sample 3 are .*\[2\] but those of sample 8 are .*\[4\]"):
        stack([np.zeros(2), np.zeros(4)], [3, 8], "inputs")
    with pytest.raises(DataError, match=r"float64 .*float32"):
        stack([np.zeros(2), torch.zeros(2)], [0, 1], "targets")


@pytest.mark.parametrize("value", ["text", [[1], [1, 2]], None])
def test_samples_that_no_tensor_holds_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"the targets of sample 4 are a .* that no tensor can hold"):
        stack([value], [4], "targets")


def test_read_only_arrays_and_tensors_are_stacked() -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    assert stack([frozen, frozen], [0, 1], "inputs").tolist() == [[0, 1, 2], [0, 1, 2]]
    assert stack([torch.ones(2, dtype=torch.bfloat16)], [0], "inputs").dtype == torch.bfloat16


def test_close_ends_the_thread_and_may_be_called_twice() -> None:
    before = threading.active_count()
    loader = Loader(Numbers(10), Share(2), seed=0)
    loader.microbatches(0)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before


@pytest.mark.slow
def test_a_process_that_ends_with_a_loader_at_work_ends_cleanly(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import torch\n"
        "from meshwright.data.dataset import Dataset\n"
        "from meshwright.data.loader import Loader\n"
        "from meshwright.data.order import Share\n"
        "class Noise(Dataset):\n"
        "    vocab_size = None\n"
        "    def read(self, index): return torch.randn(50_000), torch.zeros(50_000).cumsum(0)\n"
        "loader = Loader(Noise(1000, 0.0, {}), Share(64), seed=0)\n"
        "print(len(loader.microbatches(0)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "64\n", "")
