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


@pytest.mark.parametrize(
    "attempts", [[(2, 2), (3, 5)], pytest.param([(2, 2), (3, 4), (1, 5)], marks=pytest.mark.long)], ids=str
)
def test_other_numbers_of_ranks_go_on(tmp_path: Path, attempts: list[tuple[int, int]]) -> None:
    """An attempt is a number of ranks and its last step."""
    [alone] = run_ranks(sharded_steps, 1, tmp_path / "alone", 5)
    for num_ranks, last_step in attempts:
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


def three_steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[float]:
    losses = []
    for _ in range(3):
        loss = (model(torch.ones(2, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "a tensor as learning rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saving_and_looking_for_a_checkpoint_change_no_training(tmp_path: Path, name: str) -> None:
    def started() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters())}

    untouched, watched, late = started(), started(), started()
    losses = three_steps(untouched["optimizer"], untouched["model"])
    folder = mw.CheckpointFolder(tmp_path)
    assert folder.load(watched) is None
    folder.save(watched, 0)
    assert not watched["optimizer"].state
    assert three_steps(watched["optimizer"], watched["model"]) == losses
    folder.save(watched, 3)
    # Into an optimizer without a state, into one that has another, and back to one that had none.
    folder.load(late)
    assert three_steps(late["optimizer"], late["model"]) == three_steps(watched["optimizer"], watched["model"])
    folder.load(late, step=0)
    assert three_steps(late["optimizer"], late["model"]) == losses


def test_a_parameter_that_had_no_gradient_yet_can_be_resumed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    folder = mw.CheckpointFolder(tmp_path)
    folder.save({"model": model, "optimizer": optimizer}, 1)
    fresh = torch.optim.AdamW(model.parameters())
    folder.load({"model": model, "optimizer": fresh})
    assert set(fresh.state) == set(model["used"].parameters())
    with pytest.raises(CheckpointError, match="was saved from AdamW and is SGD"):
        folder.load({"model": model, "optimizer": torch.optim.SGD(model.parameters())})


def step_by_closure(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = model(torch.ones(1, 2)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]


def unsavable(model: nn.Module) -> dict[str, tuple[Any, str]]:
    lbfgs = torch.optim.LBFGS(model.parameters())
    step_by_closure(lbfgs, model)
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    return {
        "sparse": (torch.eye(3).to_sparse(), "layout torch.sparse_coo: save its indices"),
        "meta": (torch.empty(3, device="meta"), "on the meta device"),
        "conjugated": (torch.ones(3, dtype=torch.complex64).conj(), "a conjugated or negated view"),
        "nested": (torch.nested.nested_tensor([torch.ones(2)]), "a nested tensor"),
        "two keys": ({1: torch.ones(1), "1": torch.zeros(1)}, "keys 1 and '1' at x, one name"),
        "two values": ({1: 5, "1": 6}, "keys 1 and '1' at x, one name"),
        "cyclic": (cyclic, "contains itself"),
        "a class": (torch.utils.data.DataLoader, "the class DataLoader instead of an object"),
        "LBFGS": (lbfgs, "LBFGS at x keeps a list as"),
    }


UNSAVABLE = ("sparse", "meta", "conjugated", "nested", "two keys", "two values", "cyclic", "a class", "LBFGS")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("what", UNSAVABLE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_no_bytes_or_no_name_is_refused_by_its_path(tmp_path: Path, what: str, background: bool) -> None:
    model = nn.Linear(2, 2)
    value, message = unsavable(model)[what]
    state = {"model": model, "x": value}
    if what == "LBFGS":
        value.param_groups[0]["params"] = value._params = list(model.parameters())
        value.state = {model.weight: next(iter(value.state.values()))}
    with mw.CheckpointFolder(tmp_path) as folder:
        with pytest.raises(ConfigError, match=message):
            folder.save(state, 1, background=background)
        assert folder.steps() == []


@pytest.mark.parametrize("step", [True, 1.0, "1", None])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    folder = mw.CheckpointFolder(tmp_path)
    with pytest.raises(ConfigError, match="must be a whole number"):
        folder.save({"x": 1}, step)
    with pytest.raises(ConfigError, match="must be a whole number"):
        folder.load({"x": 1}, step)
    assert folder.steps() == []


def test_steps_that_are_there_are_named_and_a_later_one_is_never_left_behind(tmp_path: Path) -> None:
    folder = mw.CheckpointFolder(tmp_path, keep=2)
    for step in (10, 20):
        folder.save({"x": step}, step)
    state = {"x": 0}
    with pytest.raises(CheckpointError, match="no checkpoint step-7; there are: 10, 20"):
        folder.load(state, step=7)
    assert folder.load(state, step=10) is not None
    with pytest.raises(ConfigError, match="step 15 is before step-20"):
        folder.save(state, 15)
    assert folder.steps() == [10, 20]
    with pytest.raises(ConfigError, match="another process saves into"):
        mw.CheckpointFolder(tmp_path).save(state, 30)


def test_an_url_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is a URL"):
        mw.CheckpointFolder("s3://bucket/run")
    monkeypatch.setenv("HOME", str(tmp_path))
    mw.CheckpointFolder("~/run").save({"x": 1}, 1)
    assert (tmp_path / "run" / "checkpoints" / "step-1").is_dir()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.empty(2, 4, device="meta"), "on the meta device"),
        (torch.zeros(1).expand(2, 4), "share their memory"),
        (torch.zeros(5).as_strided((2, 4), (1, 1)), "share their memory"),
    ],
)
def test_a_tensor_that_cannot_be_filled_is_refused(tmp_path: Path, target: torch.Tensor, message: str) -> None:
    folder = mw.CheckpointFolder(tmp_path)
    folder.save({"x": torch.arange(4.0).expand(2, 4)}, 1)
    with pytest.raises(ConfigError, match=message):
        folder.load({"x": target})
    strided = torch.zeros(4, 8)[::2, ::2]
    folder.load({"x": strided})
    assert strided.tolist() == [[0, 1, 2, 3]] * 2


def test_a_tensor_that_changes_while_it_is_copied_is_no_checkpoint(tmp_path: Path) -> None:
    x = torch.zeros(4_000_000)
    folder = mw.CheckpointFolder(tmp_path)
    folder.save({"x": x}, 1, background=True)
    x.add_(1)
    with pytest.raises(CheckpointError, match="x/value changed while being copied: call wait_until_staged"):
        folder.finish()
    folder.close()
    assert folder.steps() == []


def different_ranks(folder: Path) -> list[str]:
    rank, found = dist.get_rank(), []
    batch_norm = nn.BatchNorm1d(3)
    batch_norm(torch.randn(8, 3, generator=torch.Generator().manual_seed(rank)))
    diverged = nn.Linear(2, 2)
    with torch.no_grad():
        diverged.weight.fill_(rank)
    tries: list[tuple[dict[str, Any], int]] = [
        ({"x": torch.full((1000, 1000), float(rank))}, 1),
        ({"n": rank}, 1),
        ({"model": diverged}, 1),
        ({"x": 1}, 5 + rank),
        ({"x": (lambda: 0) if rank else 1}, 1),
    ]
    with mw.CheckpointFolder(folder) as checkpoints:
        for state, step in tries:
            try:
                checkpoints.save(state, step)
                found.append("saved")
            except ConfigError as error:
                found.append(str(error))
        own = {"norm": batch_norm, f"rng{rank}": torch.full((3,), rank), f"name{rank}": str(rank)}
        checkpoints.save(own, 2)
        loaded: dict[str, Any] = {"norm": nn.BatchNorm1d(3), f"rng{rank}": torch.full((3,), -1), f"name{rank}": ""}
        checkpoints.load(loaded)
        found.append(f"{loaded['norm'].running_mean.tolist()} {loaded[f'rng{rank}'].tolist()} {loaded[f'name{rank}']}")
        checkpoints.save(own, 3)
        with pytest.raises(ConfigError, match="ranks name different steps: 2 on rank 0, 3 on rank 1"):
            checkpoints.load(loaded, step=2 + rank)
        try:
            checkpoints.load({"norm": batch_norm} if rank else {"norm": batch_norm, "zz": 1})
            found.append("loaded")
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_ranks_that_differ_are_refused_by_all(tmp_path: Path) -> None:
    first, second = run_ranks(different_ranks, 2, tmp_path)
    for problems, name in zip(zip(first, second, strict=True), ("x/value", "n", "model/weight"), strict=False):
        assert all(problem.startswith(f"ranks hold different values of {name}") for problem in problems)
    assert first[3] == second[3]
    assert "ranks name different steps: 5 on rank 0, 6 on rank 1" in first[3]
    assert first[4] == second[4]
    assert "a function at x" in first[4]
    means = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).mean(0).mul(0.1)
    assert first[5].rpartition("]")[2].strip() == "0"
    assert second[5].rpartition("]")[2].strip() == "1"
    for row in (first[5], second[5]):
        assert [float(each) for each in row[1:].partition("]")[0].split(",")] == pytest.approx(means.tolist(), rel=1e-5)
    assert first[6] == second[6]
    assert "lacks zz" in first[6]


def test_a_difference_names_the_value_that_changed_and_what_saves_left_can_be_removed(tmp_path: Path) -> None:
    with mw.CheckpointFolder(tmp_path) as folder:
        for step in (1, 2):
            folder.save({"epoch": step, "loader": {"seen": [step], "name": "text"}, "x": torch.ones(2)}, step)
    found = mw.checkpoints.diff(tmp_path / "checkpoints" / "step-1", tmp_path)
    assert {(one.key, str(one.left), str(one.right)) for one in found.metadata if one.key != "step"} == {
        ("values.epoch", "1", "2"),
        ("values.loader/seen", "[1]", "[2]"),
    }
    assert found.num_equal == 1
    left = tmp_path / "checkpoints" / f"step-3.tmp-{'0' * 32}"
    left.mkdir()
    assert [one.name for one in mw.checkpoints.gc(tmp_path).removals] == [left.name]
    assert folder.steps() == [1, 2]
    assert "no run of a job" in str(mw.checkpoints.ls(tmp_path).table())
