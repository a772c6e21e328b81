"""A limit on the SMs of communication is offered where it is predicted to shorten the step, and never chosen."""

from __future__ import annotations

import pytest

from meshwright.planner.plan import make_plan
from questions import ask

CHANGE = "communication_sms"


@pytest.mark.slow
def test_a_plan_offers_fewer_sms_where_they_are_predicted_to_pay() -> None:
    question = ask("llama3-8b", 64, cluster="b200-ib400", seq_len=8192, batch=64)
    plan = make_plan(question, num_runners_up=0, min_scored=0)
    assert plan.pick.layout.communication_sms is None
    (found,) = [one for one in plan.what_ifs if CHANGE in one.change]
    limit = found.best.layout.communication_sms
    assert found.best.layout == plan.pick.layout.replace(communication_sms=limit)
    assert found.best.step_s < 0.99 * plan.pick.step_s
    assert f"{CHANGE}={limit}" in found.best.unmeasured
    assert "no run has measured it" in found.note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_devices"), [("llama3.2-1b", 2), pytest.param("llama3-8b", 8, marks=pytest.mark.long)]
)
def test_a_limit_that_is_set_is_kept(model: str, num_devices: int) -> None:
    limited, free = (ask(model, num_devices, batch=num_devices, **fixed) for fixed in ({"communication_sms": 4}, {}))
    plan = make_plan(limited, num_runners_up=0, min_scored=0)
    assert plan.pick.layout.communication_sms == 4
    assert f"{CHANGE}=4" in plan.kept
    assert not [one for one in plan.what_ifs if CHANGE in one.change]
    assert make_plan(free, num_runners_up=0, min_scored=0).pick.step_s < plan.pick.step_s
