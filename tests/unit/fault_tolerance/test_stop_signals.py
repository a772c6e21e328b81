"""StopSignals: a launcher receives what asks it to stop as data, and wakes up for it."""

import signal
import threading

from meshwright.fault_tolerance.stop_request import StopSignals


def test_signals_are_taken_in_order_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stops:
        assert stops.take() == []
        assert stops.first is None
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stops.take() == [signal.SIGTERM, signal.SIGINT]
        assert stops.take() == []
        assert stops.first is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_ends_a_sleep() -> None:
    with StopSignals() as stops:
        timer = threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,))
        timer.start()
        # Far longer than a test may take.
        stops.sleep(3600)
        assert stops.take() == [signal.SIGTERM]
        timer.join()


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stops:
            signal.raise_signal(signal.SIGHUP)
            assert stops.take() == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_leaves_the_handlers_alone() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def inside() -> None:
        with StopSignals() as stops:
            found.append((signal.getsignal(signal.SIGTERM), stops.take()))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [(before, [])]
