"""The Python API refuses arguments that no command line could give, in one error that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import ConfigError
from repository import ROOT

TINY = str(ROOT / "examples" / "tiny.toml")
plan = partial(mw.plan, model="llama-1m", cluster="h100:4", seq_len=256, global_batch_size=8)
prove, simulate, check = partial(mw.prove, TINY, "tp=2"), partial(mw.simulate, TINY), partial(mw.check, TINY)
generate = partial(mw.generate, "runs/none")
DEFAULT = ": change it, or leave it out for the default "


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(plan, cluster=64), "cluster=64 must be a string: change it, or leave it out"),
        (partial(plan, seq_len="8192"), "seq_len='8192' must be a whole number: "),
        (partial(plan, seq_len=-5), "seq_len=-5 must be 1 or more: "),
        (partial(plan, global_batch_tokens=nan), "global_batch_tokens=nan must be a whole number or a string: "),
        (partial(plan, precision="fp8"), 'precision="fp8" must be one of '),
        (partial(plan, top=0), f"top=0 must be 1 or more{DEFAULT}8"),
        (partial(plan, simulate=True), "simulate=True must be a whole number: "),
        (partial(plan, stack=None), f"stack=None must be a string{DEFAULT}'meshwright'"),
        (
            partial(plan, "layout.tp"),
            "'layout.tp' names a job file, which says the model and the batch already: leave ",
        ),
        (partial(mw.plan, {}), "job = {} must be a Path or a string or a ResolvedJob: "),
        (partial(mw.plan, model="llama-1m"), 'model needs cluster="NAME:COUNT" of devices, such as cluster="h100:256"'),
        (partial(prove, steps=0), f"steps=0 must be 1 or more{DEFAULT}3"),
        (partial(prove, precision="float16"), "precision='float16' must be 'float32', 'float64' or 'mixed': "),
        (partial(prove, device="tpu"), f"device='tpu' must be 'cpu' or 'cuda'{DEFAULT}'cpu'"),
        (partial(prove, timeout_s=nan), "timeout_s=nan must be a finite number: "),
        (
            partial(prove, max_ranks=1),
            "tp=2: 2 ranks, each a process on this machine, exceed max_ranks = 1: set max_ra",
        ),
        (partial(mw.export, "runs/none", "out", dtype="fp8"), "dtype='fp8' must be 'float32' or 'bfloat16': "),
        (partial(simulate, seed=-1), f"seed=-1 must be 0 or more{DEFAULT}0"),
        (partial(simulate, slow_rank={3: 1.5}), "slow_rank={3: 1.5} must be a string or a tuple or a list: "),
        (partial(simulate, slow_rank="3"), 'slow_rank="3" is no rank and how many times slower it is: write 3:1.5'),
        (partial(simulate, routing="zipf:nan"), "routing = 'zipf:nan': must be balanced, worst, zipf:1.2"),
        (partial(simulate, ranks=4), "ranks is for build; a job's ranks are its cluster's devices: give cluster="),
        (partial(mw.simulate, build=print), "build=<built-in function print> must be a string: "),
        (partial(check, resume="x"), f"resume='x' must be True or False{DEFAULT}False"),
        (partial(check, resume=True, overwrite=True), "resume=True continues the run folder and overwrite=True"),
        (partial(mw.train, TINY, ranks=1.5), "ranks=1.5 must be a whole number: "),
        (partial(mw.resume, "runs/none"), "there is no job file or run folder runs/none: name one that exists"),
        (partial(generate, temperature=inf), "temperature=inf must be 0 (always the most likely token) or more, and f"),
        (partial(generate, top_k=0), "top_k=0 must be 1 or more; leave it out to draw from all tokens"),
        (partial(mw.load_job, 3), "path = 3 must be a Path or a string or a ResolvedJob: change it"),
        (partial(mw.load_job, TINY, None), "overrides = None must be a string: "),
        (partial(mw.compare, 3, 4), "a = 3 must be a Path or a string or a Timeline or a Simulation: change it"),
        (partial(mw.compare, str(ROOT), "runs/none"), "there is no runs/none: name a run folder, "),
        (partial(mw.diagnose, "runs/none", wait_s=-1), f"wait_s=-1 must be 0 or more{DEFAULT}5.0"),
    ],
)
def test_a_wrong_argument_is_named_with_its_rule(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert check(ranks=np.int64(2)).lines == check(ranks=2).lines


def test_a_call_that_does_not_fit_the_signature_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        check(rank=2)


@pytest.mark.slow
def test_a_table_has_a_least_width(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan()
    assert max(map(len, found.table(20).splitlines())) <= 20
    for width, rule in ((1, "20 or more"), ("80", "a whole number")):
        with pytest.raises(ConfigError, match=f"width = {width!r} must be {rule}"):
            found.table(width)
    narrow = found.table(20)
    monkeypatch.setenv("COLUMNS", "1")
    assert found.table() == narrow
