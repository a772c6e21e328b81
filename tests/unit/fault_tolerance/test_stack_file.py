"""The stack file is what this Python's faulthandler writes."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

from meshwright.fault_tolerance.evidence import read_stack


def test_the_main_thread_is_read_with_the_outermost_call_first(tmp_path: Path) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    with (tmp_path / "stack").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    over.set()
    thread.join()
    stack = read_stack(tmp_path / "stack")
    assert stack[-1].file == __file__
    assert stack[-1].function == "test_the_main_thread_is_read_with_the_outermost_call_first"
    assert "pytest" in stack[0].file or stack[0].function in ("<module>", "_run_module_as_main")
    assert read_stack(tmp_path / "none") == []
