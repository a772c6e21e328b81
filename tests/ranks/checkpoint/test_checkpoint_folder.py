"""mw.CheckpointFolder in training loops of users: stopped anywhere, on other ranks, what was saved or an error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import meshwright as mw
from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.errors import CheckpointError, ConfigError
from run_ranks import run_ranks


class Counter:
    """An object with a state of its own, as a loader has."""

    def __init__(self) -> None:
        self.count, self.betas = 0, (0.9, 0.95)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "betas": self.betas, "seen": [[1, 2], []]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["betas"], tuple)
        self.count, self.betas = state["count"], state["betas"]


def make_state(*, sharded: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    rng = torch.Generator().manual_seed(3)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "counter": Counter(),
        "rng": rng.get_state(),
        "samples": 0,
        "nested": {"averages": [torch.zeros(2), {"deep": torch.zeros(3)}], "name": "first"},
    }


def train(state: dict[str, Any], folder: mw.CheckpointFolder, last_step: int, **options: bool) -> list[float]:
    """Train from the newest checkpoint to `last_step`, saving each step; return the losses."""
    loaded = folder.load(state)
    losses = []
    for step in range(1 if loaded is None else loaded.step + 1, last_step + 1):
        rng = torch.Generator()
        rng.set_state(state["rng"])
        x = torch.randn(8, 10, generator=rng)
        loss = state["model"](x).square().mean()
        loss.backward()
        folder.wait_until_staged()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        state["rng"].copy_(rng.get_state())
        state["counter"].count += 1
        state["samples"] += len(x)
        state["nested"]["averages"][1]["deep"] += loss.detach()
        losses.append(float(loss.detach()))
        folder.save(state, step, metadata={"loss": losses[-1]}, **options)
    return losses


def values_of(state: dict[str, Any]) -> list[Any]:
    counted = state["counter"].count, state["counter"].betas, state["samples"], state["scheduler"].last_epoch
    return [*counted, state["rng"].tolist(), state["nested"]["averages"][1]["deep"].tolist(), state["nested"]["name"]]


@pytest.mark.parametrize("background", [False, True])
def test_a_loop_that_stopped_goes_on_to_the_bit(tmp_path: Path, background: bool) -> None:
    whole = make_state()
    with mw.CheckpointFolder(tmp_path / "whole") as folder:
        losses = train(whole, folder, 6)
    assert folder.steps() == [1, 2, 3, 4, 5, 6]
    parts = []
    for last_step in (3, 6):
        state = make_state()
        with mw.CheckpointFolder(tmp_path / "parts", keep=2) as kept:
            parts += train(state, kept, last_step, background=background)
    assert kept.steps() == [5, 6]
    assert parts == losses
    assert values_of(state) == values_of(whole)
    for name, tensor in whole["model"].state_dict().items():
        assert torch.equal(tensor, state["model"].state_dict()[name])
    found = mw.CheckpointFolder(tmp_path / "whole").load(make_state(), step=2)
    assert found is not None
    assert (found.step, found.metadata) == (2, {"loss": losses[1]})
    assert mw.checkpoints.verify(tmp_path / "parts").is_intact
    assert [one.step for one in mw.checkpoints.ls(tmp_path / "parts").checkpoints] == [5, 6]


def sharded_steps(folder: Path, last_step: int) -> list[float]:
    with mw.CheckpointFolder(folder) as checkpoints:
        return train(make_state(sharded=True), checkpoints, last_step, background=dist.get_world_size() == 2)


def test_other_numbers_of_ranks_go_on(tmp_path: Path) -> None:
    [alone] = run_ranks(sharded_steps, 1, tmp_path / "alone", 5)
    for num_ranks, last_step in ((2, 2), (3, 4), (1, 5)):
        for losses in run_ranks(sharded_steps, num_ranks, tmp_path / "mine", last_step):
            assert losses == pytest.approx(alone[last_step - len(losses) : last_step], rel=1e-5)
    stored = load_parameters(tmp_path / "mine" / "checkpoints" / "step-5")
    assert stored["0.weight"].shape == (7, 10)


def test_a_damaged_newest_checkpoint_is_skipped_and_an_older_one_loaded(tmp_path: Path) -> None:
    folder = mw.CheckpointFolder(tmp_path)
    train(make_state(), folder, 2)
    data = tmp_path / "checkpoints" / "step-2" / "rank-00000.bin"
    data.write_bytes(data.read_bytes()[:-1])
    loaded = folder.load(make_state())
    assert loaded is not None
    assert loaded.step == 1
    with pytest.raises(CheckpointError, match="step-7"):
        folder.load(make_state(), step=7)


def test_a_step_is_never_saved_twice(tmp_path: Path) -> None:
    folder = mw.CheckpointFolder(tmp_path)
    folder.save({"x": torch.ones(2)}, 1)
    with pytest.raises(CheckpointError, match="checkpoints are never overwritten"):
        folder.save({"x": torch.zeros(2)}, 1)
    state = {"x": torch.zeros(2)}
    folder.load(state)
    assert state["x"].tolist() == [1, 1]
    with folder:
        folder.save(state, 1, background=True)
        with pytest.raises(CheckpointError, match="checkpoints are never overwritten"):
            folder.finish()
        folder.save(state, 2, background=True)


def refusals(tmp_path: Path) -> dict[str, tuple[Any, str]]:
    state = make_state()
    return {
        "no module": ({"optimizer": state["optimizer"]}, "no modules that have all of its parameters"),
        "no JSON": ({"device": torch.device("cpu")}, "neither a tensor nor JSON"),
        "a slash": ({"a": {"b/c": torch.zeros(1)}}, "without a slash"),
        "a number": ({3: torch.zeros(1)}, "without a slash"),
    }


@pytest.mark.parametrize("what", ["no module", "no JSON", "a slash", "a number"])
def test_what_cannot_be_saved_is_refused_by_its_path(tmp_path: Path, what: str) -> None:
    state, message = refusals(tmp_path)[what]
    with pytest.raises(ConfigError, match=message):
        mw.CheckpointFolder(tmp_path).save(state, 1)
    assert mw.CheckpointFolder(tmp_path).steps() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["nested"].pop("name"), "holds unknown nested/name"),
        (lambda state: state["nested"].update(more=1), "lacks nested/more"),
        (lambda state: state["nested"]["averages"].append(torch.zeros(1)), "nested/averages/2"),
        (lambda state: state.update(model=nn.Linear(10, 7), optimizer=None), "model"),
    ],
)
def test_another_state_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = mw.CheckpointFolder(tmp_path)
    folder.save(make_state(), 1)
    state = make_state()
    change(state)
    with pytest.raises(CheckpointError, match=message):
        folder.load(state)


def test_parts_of_a_state_can_be_loaded(tmp_path: Path) -> None:
    folder = mw.CheckpointFolder(tmp_path)
    trained = make_state()
    train(trained, folder, 2)
    only = {"model": make_state()["model"]}
    folder.load(only)
    assert torch.equal(only["model"][0].weight, trained["model"][0].weight)
    assert only["model"][1].num_batches_tracked == 2


def test_values_are_those_of_the_call_and_keep_what_json_lacks(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "best": math.inf,
        "history": [1.0, {"loss": math.nan}],
        "path": "\ud800",
        "x": torch.ones(9),
    }
    with mw.CheckpointFolder(tmp_path) as folder:
        folder.save(state, 1, metadata={"loss": math.inf}, background=True)
        state["history"].append("later")
    loaded: dict[str, Any] = {"best": 0.0, "history": [], "path": "", "x": torch.zeros(9)}
    found = folder.load(loaded)
    assert found is not None
    assert found.metadata == {"loss": math.inf}
    assert (loaded["best"], loaded["path"], len(loaded["history"])) == (math.inf, "\ud800", 2)
    assert math.isnan(loaded["history"][1]["loss"])


def test_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 2.0}]
    folder = mw.CheckpointFolder(tmp_path)
    folder.save({"model": model, "optimizer": torch.optim.AdamW(groups)}, 1)
    for others in (groups[::-1], model.parameters()):
        with pytest.raises(CheckpointError, match="other parameter groups of optimizer"):
            folder.load({"model": model, "optimizer": torch.optim.AdamW(others)})
    folder.load({"model": model, "optimizer": torch.optim.AdamW(groups)})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_compiled_module_is_saved_under_its_own_names_and_an_optimizer_may_have_two(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 2)
    state = {
        "first": torch.compile(first),
        "second": second,
        "optimizer": torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9),
        "plateau": torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(second.parameters(), lr=1.0), [2, 5]),
    }
    folder = mw.CheckpointFolder(tmp_path)
    folder.save(state, 1)
    plain = nn.Linear(3, 3)
    folder.load({"first": plain})
    assert torch.equal(plain.weight, first.weight)
    folder.load(state)
    assert state["plateau"].milestones == {2: 1, 5: 1}
