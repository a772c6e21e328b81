"""Loss and gradients of pairs are those of the definition, however pairs are packed, batched and shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.data.dataset import build_dataset
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.score_pairs import score_pairs
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import TINY_MODEL

# Of 57, 20, 19 and 17 inputs: rows of 132 hold all, rows of 68 one and three, rows of 88 two and two.
PAIRS = [
    {"prompt": "A long question, to begin?", "chosen": "yes", "rejected": "no"},
    {"prompt": "1+1 is ", "chosen": "2", "rejected": "three"},
    {"prompt": "Hello", "chosen": "you, too", "rejected": "?"},
    {"prompt": "a, b, ", "chosen": "c", "rejected": "f, g"},
]
NONE, FOUR, ONE_AND_THREE, TWO_AND_TWO = ("none", 68, 4), ("whole", 132, 1), ("whole", 68, 2), ("whole", 88, 2)
"""Packing, tokens of a row, rows of the batch."""
BETA, SMOOTHING = 0.3, 0.1
CONSERVATIVE = {"beta": BETA, "label_smoothing": SMOOTHING}
IPO = {"loss": "ipo", "beta": BETA}


def job(folder: Path, rows: tuple[str, int, int], dpo: dict[str, Any] | None = None, **layout: Any) -> dict[str, Any]:
    packing, seq_len, num_rows = rows
    file = folder / "pairs.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    data = {"source": str(file), "cache_dir": str(folder / "cache"), "packing": packing, "validation_fraction": 0.0}
    return {
        "model": TINY_MODEL,
        "data": {**data, "mask_documents": True},
        "train": {"task": "dpo", "steps": 1, "seq_len": seq_len, "global_batch_size": num_rows},
        "dpo": dpo or CONSERVATIVE,
        "precision": {"compute": "float64"},
        "layout": {"dp_shard": 1, **layout},
        "run": {"device": "cpu"},
    }


def mixed(folder: Path, packing: str, seq_len: int, num_rows: int, **layout: Any) -> dict[str, Any]:
    """Return a job on the same pairs, as two sources whose answers have other names."""
    own = job(folder, (packing, seq_len, num_rows), **layout)
    for name, pairs in (("first", PAIRS[:2]), ("second", PAIRS[2:])):
        rows = ({"prompt": one["prompt"], f"{name}+": one["chosen"], f"{name}-": one["rejected"]} for one in pairs)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    del own["data"]["source"]
    own["data"]["mixture"] = [
        {"source": str(folder / f"{name}.jsonl"), "chosen_key": f"{name}+", "rejected_key": f"{name}-"}
        for name in ("first", "second")
    ]
    return own


class Measured:
    """What a step of a job came to, on one rank."""

    def __init__(self, given: dict[str, Any]) -> None:
        parsed = Job.from_dict(given)
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        dataset = build_dataset(parsed.data, parsed.train.seq_len, parsed.train.task)
        assert dataset.num_pairs == len(PAIRS)
        training = Training.build(parsed, ranks, dataset)
        self.own_scores = score_pairs(training).numpy()
        # Another model's scores: at a run's first step all margins would be zero.
        noise = np.random.default_rng(0).normal(size=self.own_scores.shape)
        training.step.reference = torch.from_numpy(self.own_scores + noise)
        self.shards: dict[str, tuple[tuple[int, ...], tuple[slice, ...], np.ndarray]] = {}
        training.step.observe_gradients = self._keep
        result = training.step(1, training.loader.microbatches(0))
        training.loader.close()
        self.loss, self.rewards, self.grad_norm = result.loss, result.loss_metrics, result.grad_norm

    def _keep(self, model: torch.nn.Module) -> None:
        for name, parameter in canonical_parameters(model):
            if parameter.grad is not None:
                local, offsets = local_box(parameter.grad)
                box = tuple(slice(at, at + size) for at, size in zip(offsets, local.shape, strict=True))
                self.shards[name] = (tuple(parameter.shape), box, local.numpy().copy())


def measure_all(jobs: list[dict[str, Any]]) -> list[Measured]:
    return [Measured(one) for one in jobs]


def gradients(of_ranks: list[Measured]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for one in of_ranks:
        for name, (shape, box, values) in one.shards.items():
            found.setdefault(name, np.full(shape, np.nan))[box] = values
    return found


def require_equal(of_ranks: list[Measured], expected: Measured, case: str) -> None:
    for one in of_ranks:
        np.testing.assert_allclose(one.own_scores, expected.own_scores, rtol=1e-11, err_msg=case)
        assert one.loss == pytest.approx(expected.loss, rel=1e-11), case
        assert one.rewards == pytest.approx(expected.rewards, rel=1e-10), case
    found, whole = gradients(of_ranks), gradients([expected])
    assert found.keys() == whole.keys(), case
    for name, gradient in whole.items():
        atol = 1e-10 * np.abs(gradient).max() + 1e-16
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=atol, err_msg=case)


def test_packing_and_microbatches_change_nothing(tmp_path: Path) -> None:
    cases = [
        (NONE, {"microbatch_size": 4}),
        (NONE, {"microbatch_size": 2}),
        (NONE, {"microbatch_size": 1}),
        (FOUR, {}),
        (ONE_AND_THREE, {"microbatch_size": 2}),
        (ONE_AND_THREE, {"microbatch_size": 1}),
        (TWO_AND_TWO, {"microbatch_size": 2}),
        (TWO_AND_TWO, {"microbatch_size": 1}),
        (NONE, {"microbatch_size": 2, "loss_chunks": 5}),
        (FOUR, {"loss_chunks": 3}),
    ]
    for rows, _ in cases:
        parsed = Job.from_dict(job(tmp_path, rows))
        assert build_dataset(parsed.data, parsed.train.seq_len, "dpo").num_training_samples == rows[2]
    (found,) = run_ranks(measure_all, 1, [job(tmp_path, rows, **layout) for rows, layout in cases])
    for case, one in zip(cases, found, strict=True):
        require_equal([one], found[0], str(case))


def test_no_layout_changes_anything(tmp_path: Path) -> None:
    ((expected,),) = run_ranks(measure_all, 1, [job(tmp_path, NONE, microbatch_size=4)])
    cases = [
        (ONE_AND_THREE, {"dp_shard": 2}),
        (NONE, {"dp_replicate": 2, "microbatch_size": 2}),
        (FOUR, {"cp": 2, "cp_method": "all-gather"}),
        (TWO_AND_TWO, {"cp": 2, "cp_method": "ring"}),
        (ONE_AND_THREE, {"cp": 2, "cp_method": "ulysses"}),
        (ONE_AND_THREE, {"tp": 2}),
        (TWO_AND_TWO, {"tp": 2, "microbatch_size": 2}),
        (TWO_AND_TWO, {"pp": 2}),
        (NONE, {"pp": 2, "microbatch_size": 2}),
        (ONE_AND_THREE, {"dp_shard": 2, "loss_chunks": 2}),
        (FOUR, {"cp": 2, "loss_chunks": 3}),
        (TWO_AND_TWO, {"tp": 2, "loss_chunks": 2}),
        (NONE, {"pp": 2, "loss_chunks": 4}),
        (NONE, {"pp": 2, "loss_chunks": 2, "schedule": "InterleavedZeroBubble", "virtual_stages": 1}),
    ]
    by_rank = run_ranks(measure_all, 2, [job(tmp_path, rows, **layout) for rows, layout in cases])
    for case, found in zip(cases, zip(*by_rank, strict=True), strict=True):
        require_equal(list(found), expected, str(case))


def test_a_weight_that_another_microbatch_has_freed_is_gathered_again(tmp_path: Path) -> None:
    ((expected,),) = run_ranks(measure_all, 1, [job(tmp_path, NONE, microbatch_size=4)])
    freed = {"pp": 2, "dp_shard": 2, "schedule": "GPipe", "loss_chunks": 2, "reshard_after_forward": "always"}
    found = run_ranks(measure_all, 4, [job(tmp_path, NONE, **freed)])
    require_equal([one for (one,) in found], expected, "freed")


def test_a_mixture_is_the_pairs_of_its_sources(tmp_path: Path) -> None:
    ((expected,),) = run_ranks(measure_all, 1, [job(tmp_path, NONE, microbatch_size=4)])
    # Rows of 88 hold two pairs of the second source and one or two of the first.
    (found,) = run_ranks(measure_all, 1, [mixed(tmp_path, *rows) for rows in (NONE, TWO_AND_TWO)])
    for one in found:
        require_equal([one], expected, "one rank")
    cases = [
        (NONE, {"dp_shard": 2}),
        (TWO_AND_TWO, {"cp": 2}),
        (TWO_AND_TWO, {"tp": 2, "loss_chunks": 2}),
        (NONE, {"pp": 2, "microbatch_size": 2}),
    ]
    by_rank = run_ranks(measure_all, 2, [mixed(tmp_path, *rows, **layout) for rows, layout in cases])
    for case, found in zip(cases, zip(*by_rank, strict=True), strict=True):
        require_equal(list(found), expected, str(case))


def loss_of_a_pair(dpo: dict[str, Any], chosen: Tensor, rejected: Tensor, num_tokens: tuple[int, int]) -> Tensor:
    """Return the loss of log-ratios of both answers, written down once more."""
    if dpo.get("loss") == "ipo":
        return (chosen / num_tokens[0] - rejected / num_tokens[1] - 1 / (2 * BETA)) ** 2
    margin, swapped = BETA * (chosen - rejected), dpo.get("label_smoothing", 0.0)
    if dpo.get("loss") == "hinge":
        return (1 - margin).clamp(min=0)
    right, wrong = margin.sigmoid().log(), (1 - margin.sigmoid()).log()
    if dpo.get("loss") == "robust":
        return -((1 - swapped) * right - swapped * wrong) / (1 - 2 * swapped)
    return -((1 - swapped) * right + swapped * wrong)


def by_definition(given: dict[str, Any]) -> tuple[float, dict[str, Tensor], Measured]:
    """Return the loss and its gradients of each answer alone in a batch of one, and what a step computes."""
    measured = Measured(given)
    parsed = Job.from_dict(given)
    training = Training.build(parsed, Ranks(0, 1, torch.device("cpu")))
    (model,), losses = training.model, []
    noise = np.random.default_rng(0).normal(size=measured.own_scores.shape)
    for pair, own, off in zip(PAIRS, measured.own_scores, noise, strict=True):
        log_ratios = []
        for answer, reference in zip((pair["chosen"], pair["rejected"]), own + off, strict=True):
            ids = torch.tensor([*f"{pair['prompt']}{answer}".encode(), 256])
            logits = model(ids[None, :-1], positions_S=torch.arange(len(ids) - 1), documents_BS=None)[0]
            of_tokens = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            log_ratios.append(of_tokens[len(pair["prompt"]) - 1 :].sum() - float(reference))
        # An answer ends with end of text.
        num_tokens = len(pair["chosen"]) + 1, len(pair["rejected"]) + 1
        losses.append(loss_of_a_pair(given["dpo"], *log_ratios, num_tokens))
    loss = torch.stack(losses).mean()
    loss.backward()
    training.loader.close()
    return loss.item(), {name: local_box(p.grad)[0] for name, p in canonical_parameters(training.model)}, measured


LOSSES = [CONSERVATIVE, {"beta": BETA}, {**CONSERVATIVE, "loss": "robust"}, {"beta": BETA, "loss": "hinge"}, IPO]


@pytest.mark.parametrize("dpo", LOSSES, ids=["conservative", "sigmoid", "robust", "hinge", "ipo"])
def test_loss_and_gradients_are_those_of_the_definition(dpo: dict[str, Any], tmp_path: Path) -> None:
    ((loss, expected, found),) = run_ranks(by_definition, 1, job(tmp_path, ONE_AND_THREE, dpo))
    assert found.loss == pytest.approx(loss, rel=1e-12)
    whole = gradients([found])
    assert whole.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(whole[name], gradient, rtol=0, atol=1e-10 * float(gradient.abs().max()))


def test_means_over_tokens_are_of_whole_answers_on_every_layout(tmp_path: Path) -> None:
    ((expected,),) = run_ranks(measure_all, 1, [job(tmp_path, NONE, IPO, microbatch_size=4)])
    cases = [
        (FOUR, {"cp": 2, "cp_method": "ring"}),
        (ONE_AND_THREE, {"tp": 2}),
        (TWO_AND_TWO, {"pp": 2}),
        (NONE, {"dp_shard": 2}),
    ]
    by_rank = run_ranks(measure_all, 2, [job(tmp_path, rows, IPO, **layout) for rows, layout in cases])
    for case, found in zip(cases, zip(*by_rank, strict=True), strict=True):
        require_equal(list(found), expected, str(case))
