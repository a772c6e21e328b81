import os
import signal

import pytest
from torch import distributed as dist

from meshwright.errors import ConfigError, ExitCode, NonFiniteError
from meshwright.fault_tolerance.lost_peer import exit_code_of, is_lost_peer, words_of
from meshwright.fault_tolerance.stop_request import StopRequest
from meshwright.trainer.step.step_requirements import require_finite, wrong_losses_text


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), 1.0)])
def test_a_non_finite_step_stops_with_its_numbers(loss: float, norm: float) -> None:
    with pytest.raises(NonFiniteError, match=f"step 7: loss = {loss}, gradient norm = {norm}"):
        require_finite(7, loss, norm)


def test_the_advice_of_a_non_finite_step_is_asked_for_only_then() -> None:
    with pytest.raises(NonFiniteError, match="the last checkpoint is unchanged: take other weights"):
        require_finite(7, float("nan"), 1.0, lambda: "take other weights")
    require_finite(7, 1.0, 1.0, lambda: pytest.fail("not asked for"))


def test_a_finite_step_passes() -> None:
    require_finite(1, 3.0, 0.0)


def test_a_lost_peer_is_told_from_a_bug() -> None:
    assert is_lost_peer(RuntimeError("[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:3333"))
    assert is_lost_peer(RuntimeError("Gloo connectFullMesh failed with [gloo/pair.h:311] Connect timeout [none]"))
    assert is_lost_peer(dist.DistNetworkError("the client socket has failed to connect"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_peer(ValueError("Connection closed by peer"))


def test_of_what_a_backend_says_its_first_sentence_is_kept() -> None:
    said = "[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:3333. Check the logs of the remote worker. GLHF! x"
    assert words_of(RuntimeError(said)) == "[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:3333"


def test_exit_codes_say_whether_to_retry() -> None:
    assert exit_code_of(ConfigError("")) is ExitCode.BAD_INPUT
    assert exit_code_of(NonFiniteError("")) is ExitCode.DO_NOT_RETRY
    assert exit_code_of(KeyboardInterrupt()) is ExitCode.INTERRUPTED
    assert exit_code_of(RuntimeError("Connection closed by peer")) is ExitCode.RETRY
    assert exit_code_of(ZeroDivisionError()) is ExitCode.DO_NOT_RETRY


def test_a_stop_request_keeps_the_first_signal_and_gives_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_while_an_error_ends_the_process_changes_nothing() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    stop = StopRequest()
    try:
        with pytest.raises(ConnectionError), stop:
            raise ConnectionError("a peer is gone")
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal is signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_interrupt_does_not_wait() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_only_some_ranks_losses_are_worth_a_word() -> None:
    assert wrong_losses_text([1], 4) == "only the loss of rank 1 is not finite: "
    assert wrong_losses_text([1, 3], 4) == "only the loss of ranks 1, 3 is not finite: "
    # Of gradients only, or of all.
    assert wrong_losses_text([], 4) == wrong_losses_text([0, 1], 2) == ""
