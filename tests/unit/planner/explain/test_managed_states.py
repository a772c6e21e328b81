"""Optimizer states in managed memory are offered where they are predicted to shorten the step or to make it fit."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.explain.verdict import verdict
from meshwright.planner.plan import make_plan
from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.layout.layout import Layout
from questions import ask

CHANGE = "memory.optimizer_state=uvm"


def test_a_plan_whose_state_waits_on_the_host_names_the_key_and_its_step() -> None:
    question = ask("llama3-8b", 1, cluster="h200-ib400", batch=8)
    plan = make_plan(question, num_runners_up=0, min_scored=0)
    assert plan.pick.layout.cpu_offload
    what_if = next(one for one in plan.what_ifs if one.change == CHANGE)
    managed = make_plan(question.with_setup(memory=MemorySection(optimizer_state="uvm")), 0, min_scored=0)
    assert what_if.best.step_s == managed.pick.step_s < plan.pick.step_s
    assert managed.kept == (CHANGE,)
    assert not any(one.change == CHANGE for one in managed.what_ifs)


def test_a_layout_that_does_not_fit_is_told_each_key_with_its_section() -> None:
    layout = Layout(activation_checkpoint="full", loss_chunks=16)
    question = replace(ask("llama3-8b", 1, cluster="h200-ib400", batch=8), given=layout)
    problem = verdict(question).problem()
    assert problem is not None
    assert f"set {CHANGE} (" in str(problem)
    assert ", or layout.cpu_offload=true (" in str(problem)
