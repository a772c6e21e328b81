"""A compilation that failed since a signal ended a compiler, now or in an earlier run, is no bug."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshwright.errors import Preempted, Retryable
from meshwright.fault_tolerance.stop_request import StopRequest
from meshwright.trainer.run.compile_watch import explained_compilation


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)])
def test_a_compilation_that_a_signal_ended_is_no_bug(number: signal.Signals, ending: type[BaseException]) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    def stopped(error: BaseException, *numbers: signal.Signals) -> None:
        with StopRequest() as stop, explained_compilation(stop):
            for each in numbers:
                signal.raise_signal(each)
            raise error

    killed = type("CppCompileError", (RuntimeError,), {"__module__": "torch._inductor.exc"})
    try:
        with pytest.raises(ending):
            stopped(killed("g++ ended"), number)
        with pytest.raises(ZeroDivisionError):
            stopped(ZeroDivisionError(), number)
        with pytest.raises(killed):
            stopped(killed("a template that g++ refuses"))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("is_of_cache", [True, False])
def test_half_a_library_in_the_cache_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_cache: bool
) -> None:
    """As inductor says it where a library of its cache is empty (torch 2.13); a file elsewhere is left alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    library = tmp_path / ("cache/cq" if is_of_cache else "lib") / "ccqqm.main.so"
    library.parent.mkdir(parents=True)
    library.touch()
    failed = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})
    with pytest.raises(Retryable if is_of_cache else failed, match=str(library)), explained_compilation(StopRequest()):
        raise failed(f"ImportError: {library}: file too short")
    assert library.exists() != is_of_cache
