"""A hang in a data class of one's own is shown at its line, though another thread than the loop's reads."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from meshwright.data.loader import Loader
from meshwright.data.order import Share
from meshwright.data.user_dataset import UserDataset
from meshwright.fault_tolerance.diagnose import diagnose
from meshwright.fault_tolerance.evidence import ask, look, read_heartbeats
from meshwright.fault_tolerance.hangs.hang_watch import HangWatch
from meshwright.spec.job.sections import DataSection, RunSection
from meshwright.spec.run.run import Run


class Stuck:
    """Samples of which one never comes."""

    def __init__(self) -> None:
        self.is_reached, self.goes_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        if index == 20:
            self.wait()
        return [index], [index]

    def wait(self) -> None:
        self.is_reached.set()
        self.goes_on.wait()


@contextmanager
def stuck_rank(run: Run) -> Iterator[None]:
    """Let the loop of a rank wait in a thread for a batch that does not come."""
    data = Stuck()

    def loop() -> None:
        dataset = UserDataset(DataSection(source="mine:Stuck", validation_fraction=0.0), data)
        with HangWatch(run, 0, 1, RunSection(hang_after_s=0.2, hang_limit_s=1e6)) as watch:
            loader = Loader(dataset, Share(8, 8), seed=0, shuffle=False)
            for step in range(1, 5):
                watch.begin_step(step)
                loader.microbatches(step - 1)
            loader.close()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        assert data.is_reached.wait(60)
        # It is read ahead, while the loop is a step behind.
        while read_heartbeats(run)[0].step < 3:
            time.sleep(0.01)
        yield
    finally:
        data.goes_on.set()
        thread.join(60)


def test_the_line_is_that_of_the_data_class(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with stuck_rank(run):
        ask(run, 60)
        seen = look(run)
    line = Path(__file__).read_text(encoding="utf-8").splitlines().index("        self.goes_on.wait()") + 1
    where = f"at {__file__}:{line} in Stuck.wait"
    found = diagnose(seen)
    assert found.ranks[0].doing == where
    later = diagnose(replace(seen, now_s=seen.now_s + 100.0))
    assert later.headline.endswith(f"none is known to wait for another: rank 0 is in step 3, data, {where}")
