"""Objects of other ranks are unpickled only with a proof that they are of this job."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.signed_objects import TOKEN_VARIABLE, signed, verified
from meshwright.errors import LostPeer


class Malicious:
    """What runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "of this job")


def test_a_rank_of_the_job_is_believed() -> None:
    assert verified(signed({"step": 3}, 1), 1) == {"step": 3}


@pytest.mark.parametrize("how", ["bare", "of another job", "of another rank", "changed"])
def test_nothing_else_is_unpickled(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "was_run"
    with monkeypatch.context() as elsewhere:
        if how == "of another job":
            elsewhere.setenv(TOKEN_VARIABLE, "of another job")
        data = signed(Malicious(marker), 2 if how == "of another rank" else 1)
    if how == "bare":
        pickled = pickle.dumps(Malicious(marker))
        data = torch.frombuffer(bytearray(bytes(32) + pickled), dtype=torch.uint8)
    elif how == "changed":
        data[-1] ^= 1
    with pytest.raises(LostPeer, match="rank 1 has no proof of this job's token"):
        verified(data, 1)
    assert not marker.exists()
