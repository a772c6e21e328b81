"""What preference optimisation is refused with, and that what is suggested works."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.spec.job.job import Job
from meshwright.spec.job.validity import with_fix

PAIRS = {"source": "pairs.jsonl", "packing": "whole", "mask_documents": True}


def job(**sections: dict[str, Any]) -> Job:
    given = {"data": PAIRS, "train": {"task": "dpo"}}
    return Job.from_dict({name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}})


def test_pairs_in_rows_of_their_own_or_packed_are_valid() -> None:
    assert job().problems() == []
    assert job(data={"packing": "none"}).problems() == []
    assert job(dpo={"beta": 0.5, "label_smoothing": 0.1}, adapter={"kind": "lora"}).problems() == []
    assert job(data={"train_on": "last", "chosen_key": "better", "rejected_key": "worse"}).problems() == []


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"packing": "split"}}, "both answers of a pair into one sequence"),
        ({"data": {"mask_documents": False}}, "both answers of a pair into one sequence"),
        ({"data": {"packing": "none", "mask_documents": False}}, "both answers of a pair into one sequence"),
        ({"data": {"too_long": "cut"}}, 'data.too_long = "cut"'),
        ({"data": {"train_on": "all"}}, 'data.train_on = "all"'),
        ({"data": {"messages_key": "turns"}}, 'data.messages_key = "turns" does nothing'),
        ({"precision": {"float8": "rowwise", "compute": "bfloat16"}}, 'precision.float8 = "rowwise"'),
        ({"train": {"exact_elastic": True}}, "train.exact_elastic = true"),
        ({"dpo": {"loss": "ipo", "label_smoothing": 0.1}}, "dpo.label_smoothing = 0.1"),
        ({"dpo": {"loss": "hinge", "label_smoothing": 0.1}}, "dpo.label_smoothing = 0.1"),
    ],
)
def test_what_does_not_go_with_pairs_is_named_and_fixed(sections: dict[str, Any], words: str) -> None:
    given = job(**sections)
    (problem,) = given.problems()
    assert words in problem
    assert problem.fixes
    assert all(with_fix(given, fix).problems() == [] for fix in problem.fixes)


def test_a_mixture_of_pairs_is_valid_whose_tables_name_their_answers() -> None:
    mixture = [{"source": "a.jsonl", "chosen_key": "better", "rejected_key": "worse"}, {"source": "b.jsonl"}]
    data = {key: value for key, value in PAIRS.items() if key != "source"} | {"mixture": mixture}
    assert Job.from_dict({"data": data, "train": {"task": "dpo"}}).problems() == []
    problems = Job.from_dict({"data": data, "train": {"task": "sft"}}).problems()
    assert [words in one for one, words in zip(problems, ('chosen_key = "better"', "rejected_key"), strict=True)]
    assert all('does nothing with train.task = "sft"' in one for one in problems)


def test_a_class_of_the_users_is_refused() -> None:
    problems = job(data={"source": "my_data:Pairs", "packing": "split", "mask_documents": False}).problems()
    assert any("makes its own samples" in one for one in problems)


def test_too_long_pairs_get_one_advice_whatever_the_packing() -> None:
    problems = job(data={"packing": "split", "too_long": "cut"}).problems()
    assert [one for one in problems if "data.too_long" in one and "skip" not in one] == []
    assert sum("data.too_long" in one for one in problems) == 1


@pytest.mark.parametrize(("key", "value"), [("beta", 0.3), ("label_smoothing", 0.3), ("loss", "ipo")])
def test_keys_of_dpo_do_nothing_for_another_task(key: str, value: Any) -> None:
    (problem,) = Job.from_dict({"dpo": {key: value}}).problems()
    assert f"dpo.{key} = {json.dumps(value)} does nothing" in problem


@pytest.mark.parametrize("key", ["chosen_key", "rejected_key"])
def test_keys_of_pairs_do_nothing_for_another_task(key: str) -> None:
    (problem,) = Job.from_dict({"data": {key: "other"}}).problems()
    assert f'data.{key} = "other" does nothing with train.task = "pretrain"' in problem
