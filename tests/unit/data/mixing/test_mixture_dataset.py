"""A mixture of sources is one dataset, whose checkpoints name what changed of which source."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.data_problems import problems
from meshwright.data.dataset import build_dataset
from meshwright.data.loader import Loader
from meshwright.data.order import Share, check_resumable
from meshwright.errors import DataError
from meshwright.spec.job.job import Job
from meshwright.spec.job.mixture_source import MixtureSource
from meshwright.spec.job.sections import DataSection
from written_corpora import write_megatron

SEQ_LEN = 8


def mixture(folder: Path, *weights: float, **options: Any) -> DataSection:
    """Return three sources: text of a, JSON lines of b, stored tokens of c, each 200 tokens or more."""
    (folder / "web.txt").write_text("a" * 400)
    (folder / "books.jsonl").write_text('{"body": "bbbbbbbbbb"}\n' * 40)
    write_megatron(folder / "code", [[ord("c")] * 20] * 20)
    names = ("web.txt", "books.jsonl", "code")
    tables = tuple(
        MixtureSource(source=str(folder / name), weight=weight, text_key="body" if "books" in name else None)
        for name, weight in zip(names, weights, strict=False)
    )
    return DataSection(mixture=tables, cache_dir=str(folder / "cache"), validation_fraction=0.1).replace(**options)


def letters(data: DataSection, num_steps: int, share: Share | None = None) -> str:
    """Return the letter of each sample of the first steps, in the order of slots of one rank."""
    loader = Loader(build_dataset(data, SEQ_LEN), share or Share(10), seed=0)
    batches = [batch for step in range(num_steps) for batch in loader.microbatches(step)]
    loader.close()
    # Above every letter is the end of text.
    return "".join(chr(row.min()) for batch in batches for row in batch.inputs)


def test_samples_have_their_shares_in_every_step(tmp_path: Path) -> None:
    data = mixture(tmp_path, 0.5, 0.3, 0.2)
    for start in range(0, 80, 10):
        found = letters(data, 8)[start : start + 10]
        assert (found.count("a"), found.count("b"), found.count("c")) == (5, 3, 2)


def test_weights_change_at_the_steps_of_stages(tmp_path: Path) -> None:
    data = mixture(tmp_path, 1.0, 1.0)
    first, second = data.mixture
    tables = (
        MixtureSource(source=first.source, weights=(1.0, 0.5, 0.0)),
        MixtureSource(source=second.source, text_key="body", weights=(0.0, 0.5, 1.0)),
    )
    found = letters(data.replace(mixture=tables, stage_steps=(2, 4)), 6)
    assert found[:20] == "a" * 20
    assert (found[20:40].count("a"), found[20:40].count("b")) == (10, 10)
    assert found[40:] == "b" * 20


def test_what_was_read_follows_from_the_step_alone(tmp_path: Path) -> None:
    data = mixture(tmp_path, 0.5, 0.3, 0.2)
    loader = Loader(build_dataset(data, SEQ_LEN), Share(10), seed=0)
    uses = loader.use(7)
    loader.close()
    assert [(use.name, use.num_samples) for use in uses] == [("web", 35), ("books", 21), ("code", 14)]
    found = letters(data, 7)
    assert [found.count(letter) for letter in "abc"] == [35, 21, 14]
    assert uses[0].epochs == pytest.approx(35 / 45)


def test_validation_has_the_last_samples_of_each_source_in_turn(tmp_path: Path) -> None:
    dataset = build_dataset(mixture(tmp_path, 0.5, 0.3, 0.2), SEQ_LEN)
    found = [chr(dataset.validation_sample(index)[1].min()) for index in range(dataset.num_validation_samples)]
    alone = [
        build_dataset(data, SEQ_LEN).num_validation_samples
        for data in (
            DataSection(source=str(tmp_path / "web.txt"), validation_fraction=0.1, cache_dir=str(tmp_path / "cache")),
            DataSection(source=str(tmp_path / "code"), validation_fraction=0.1, cache_dir=str(tmp_path / "cache")),
        )
    ]
    assert [found.count("a"), found.count("c")] == alone
    assert set(found[:4]) == {"a", "b", "c"}


def test_a_mixture_resumes_on_other_ranks_and_names_what_changed(tmp_path: Path) -> None:
    data = mixture(tmp_path, 0.5, 0.3, 0.2)

    def position(section: DataSection) -> dict[str, Any]:
        loader = Loader(build_dataset(section, SEQ_LEN), Share(10), seed=0)
        loader.close()
        found: dict[str, Any] = json.loads(json.dumps(loader.position))
        return found

    saved = position(data)
    check_resumable(saved, position(data))
    changed = data.replace(mixture=(data.mixture[0].replace(weight=0.6), *data.mixture[1:]))
    with pytest.raises(DataError, match=r"data.mixture, table 1 \(web\): weights was \[5\] and is now \[6\]"):
        check_resumable(saved, position(changed))
    with pytest.raises(DataError, match=r"tables of data.mixture were web, books, code and are now web, books\."):
        check_resumable(saved, position(data.replace(mixture=data.mixture[:2])))
    (tmp_path / "books.jsonl").write_text('{"body": "bbbbbbbbbc"}\n' * 40)
    with pytest.raises(DataError) as caught:
        check_resumable(saved, position(data))
    assert "data.mixture, table 2 (books): content_hash was" in str(caught.value)
    assert "web" not in str(caught.value)


def test_an_error_of_a_source_names_its_table(tmp_path: Path) -> None:
    data = mixture(tmp_path, 0.5, 0.5)
    wrong = data.replace(mixture=(data.mixture[0], data.mixture[1].replace(text_key="text")))
    match = r"data.mixture, table 2 \(books\): .*books.jsonl:1 has no field 'text' .*: set text_key to"
    with pytest.raises(DataError, match=match) as caught:
        build_dataset(wrong, SEQ_LEN)
    assert problems(wrong, SEQ_LEN, None) == [str(caught.value)]
    assert problems(data, SEQ_LEN, None) == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"source": "a.txt"}, 'data.source = "a.txt" and data.mixture of 2 tables are both given'),
        (
            {"stage_steps": (5, 3)},
            "data.stage_steps = [5, 3] must rise from stage to stage: set data.stage_steps to [3, 5]",
        ),
        ({"mixture": ({"source": "x/a.txt"}, {"source": "y/a.md"})}, 'data.mixture: 2 tables have the name "a"'),
        ({"mixture": ({"source": "mine:Data"},)}, 'table 1 (mine:Data): source = "mine:Data" is a class of your own'),
        ({"mixture": ({"source": "a", "weights": (1.0, 2.0)},)}, "weights has 2 numbers for 1 stage"),
        ({"mixture": ({"source": "a", "weight": 2.0, "weights": (1.0,)},)}, "weight and weights are both given"),
        ({"mixture": ({"source": "a"}, {"source": "b", "weight": 0.0})}, "table 2 (b): no weight is above 0"),
        (
            {"stage_steps": (5,), "mixture": ({"source": "a", "weights": (1.0, 0.0)},)},
            "no weight is above 0 in stage 2",
        ),
        (
            {"mixture": ({"source": "a", "weight": 0.30000000000000004}, {"source": "b"})},
            "have no common unit in which they sum to less than 2^31: write them with fewer digits",
        ),
        ({"mixture": (), "stage_steps": (5,)}, "changes the weights of data.mixture, which has no table"),
    ],
)
def test_contradictions_of_a_mixture_are_named(changes: dict[str, Any], match: str) -> None:
    data = {"mixture": ({"source": "a"}, {"source": "b"}), **changes}
    found = Job.from_dict({"data": data}).problems()
    assert any(match in problem for problem in found), found
