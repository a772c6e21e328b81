import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.dataset import build_dataset
from meshwright.data.loader import Loader, Microbatch
from meshwright.data.open_loader import open_loader
from meshwright.data.order import Share
from meshwright.data.workers.sample_workers import SampleWorkers
from meshwright.errors import DataUnavailable, MeshwrightError
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import DataSection, TrainSection

pytestmark = pytest.mark.slow


def section_of(num_workers: int, **options: Any) -> DataSection:
    return DataSection(
        source="sample_sources:Numbered", options=options, num_workers=num_workers, validation_fraction=0.2
    )


@contextmanager
def opened(section: DataSection, share: Share) -> Iterator[Loader]:
    reader = open_loader(build_dataset(section, 32), share, Job(data=section, train=TrainSection(seq_len=32, seed=5)))
    try:
        yield reader
    finally:
        reader.close()


def values(batches: list[Microbatch]) -> list[Any]:
    return [(batch.first_slot, batch.inputs.tolist(), batch.targets.tolist()) for batch in batches]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is still to be waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("prefetch_batches", [1, 3])
def test_any_number_of_workers_gives_the_same_samples_in_the_same_order(
    num_workers: int, prefetch_batches: int
) -> None:
    share = Share(12, 2, 1, 2)
    steps = [0, 1, 2, 3, 7, 7, 1]
    with opened(section_of(0), share) as alone:
        expected = [values(alone.microbatches(step)) for step in steps]
        validation = values(alone.validation_microbatches(1))
    with opened(section_of(num_workers).replace(prefetch_batches=prefetch_batches), share) as reader:
        assert [values(reader.microbatches(step)) for step in steps] == expected
        assert values(reader.validation_microbatches(1)) == validation


def test_text_is_read_by_workers_too(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{number} bottles of beer\n" for number in range(400)))
    plain = DataSection(source=str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "cache"))
    found = []
    for num_workers in (0, 2):
        with opened(plain.replace(num_workers=num_workers), Share(4, 2)) as reader:
            found.append([values(reader.microbatches(step)) for step in range(3)])
    assert found[0] == found[1]


def test_an_error_of_the_users_has_the_sample_and_the_traceback_of_the_worker() -> None:
    workers = SampleWorkers(section_of(2, bad=7), 32)
    assert len(workers.submit([1, 2])()) == 2
    with pytest.raises(
        MeshwrightError, match=r"(?s)reading sample 7 in a worker process .*sample_sources.py.*record 7"
    ) as it:
        workers.submit([6, 7])()
    assert it.value.exit_code == 70
    # Such a worker reads on.
    assert len(workers.submit([8])()) == len(workers.submit([9])()) == 1
    workers.close()


def test_a_killed_worker_is_an_error_that_another_attempt_may_pass() -> None:
    workers = SampleWorkers(section_of(1, killed_at=3), 32)
    with pytest.raises(DataUnavailable, match=r"worker process \d+ of data.num_workers = 1 died \(signal 9\)") as it:
        workers.submit([2, 3])()
    assert it.value.exit_code == 75
    with pytest.raises(DataUnavailable):
        workers.submit([1])()
    workers.close()
    workers = SampleWorkers(section_of(2), 32)
    workers.submit([1])()
    for pid in workers.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataUnavailable):
        workers.submit([1])()
    workers.close()


def test_no_worker_outlives_close_even_if_it_hangs() -> None:
    workers = SampleWorkers(section_of(2, hangs_at=3), 32)
    workers.submit([1])()
    workers.submit([3])
    pids = workers.pids
    assert all(map(is_alive, pids))
    workers.close()
    assert not any(map(is_alive, pids))


def test_a_killed_rank_leaves_no_worker_behind(tmp_path: Path) -> None:
    script = tmp_path / "reads.py"
    script.write_text(
        "import os, signal\n"
        "from meshwright.data.workers.sample_workers import SampleWorkers\n"
        "from meshwright.spec.job.sections import DataSection\n"
        "if __name__ == '__main__':\n"
        "    workers = SampleWorkers(DataSection(source='sample_sources:Numbered', num_workers=2), 32)\n"
        "    workers.submit([1])()\n"
        "    print(*workers.pids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    # Workers have this pipe, too: it ends once they have.
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2
    assert not any(map(is_alive, map(int, done.stdout.split())))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_numbered_samples_that_end_their_process_are_an_error(num_workers: int) -> None:
    with (
        opened(section_of(num_workers, exits_at=7), Share(12)) as reader,
        pytest.raises(MeshwrightError, match=r"reading sample 7 of .* raised SystemExit: 0 \(.*sample_sources.py"),
    ):
        [reader.microbatches(step) for step in range(4)]
