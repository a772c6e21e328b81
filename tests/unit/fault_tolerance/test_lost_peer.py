"""A rank whose peer is gone ends with the code of a restart, whatever the peer was asked for."""

import pytest

from meshwright.channels.channel import new_token
from meshwright.channels.key_value import KeyValueClient, StoreLost
from meshwright.errors import ExitCode
from meshwright.fault_tolerance.lost_peer import exit_code_of, is_lost_peer


def test_a_store_that_went_with_its_rank_is_a_lost_peer() -> None:
    with pytest.raises(StoreLost) as refused:
        KeyValueClient(("127.0.0.1", 1), new_token(), timeout_s=0.2)
    assert is_lost_peer(refused.value)
    assert exit_code_of(refused.value) is ExitCode.RETRY


@pytest.mark.parametrize("error", [ConnectionError("of a user's"), TimeoutError("of a user's"), KeyError("x")])
def test_errors_of_others_are_none(error: Exception) -> None:
    assert not is_lost_peer(error)
