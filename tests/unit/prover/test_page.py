"""The page of what composes says of each pair whether it met, how well, or why it cannot."""

import pytest

from meshwright.prover.page import AXES, CHOICES, PIPELINES, combination, matrix_page
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.layout.covering import covering_layouts
from meshwright.spec.layout.layout_text import layout_text, parse_layout
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.proof import Difference, LayoutProof, Proof

JOB = Job(model=ModelSection(source="moe-4m"))


def proven(text: str, share: float = 0.5) -> LayoutProof:
    difference = Difference(kind="loss", name="", step=1, relative=share * 1e-6, bar=1e-6)
    return LayoutProof(layout=parse_layout(text), differences=(difference,), took_s=1.0)


def proof(*layouts: LayoutProof) -> Proof:
    versions = {"torch": "2.13.0", "hostname": "secret"}
    return Proof(
        job=JOB,
        changes=(),
        num_steps=3,
        num_parameters=1000,
        precision="float32",
        layouts=layouts,
        date="2026-01-02",
        versions=versions,
        took_s=90.0,
    )


def table(page: str, title: str) -> dict[str, list[str]]:
    """Return the rows of the table under a title, by their first cell."""
    lines = page.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| ---")]
    return {first.strip("*"): others for first, *others in cells}


def cell(page: str, title: str, row: str, column: str) -> str:
    rows = table(page, title)
    corner, *_ = rows
    return rows[row][rows[corner].index(column)]


PAGE = matrix_page(
    proof(
        proven("tp=2,pp=2", 0.25),
        proven("tp=2,pp=2,dp_shard=2,schedule=DualPipeV", 0.75),
        proven("cp=2,tp=2", 3.0),
        proven("dp_shard=2,activation_checkpoint=full"),
    ),
    "meshwright prove job.toml",
)


@pytest.mark.parametrize(
    ("title", "row", "column", "mark"),
    [
        ("Axes", "tp", "pp", "75%"),
        ("Axes", "pp", "dp_shard", "75%"),
        ("Axes", "pp", "pp", "75%"),
        ("Axes", "cp", "tp", "**wrong**"),
        ("Axes", "ep", "tp", "*untested*"),
        ("Axes", "dp_replicate", "dp_replicate", "*untested*"),
        ("Pipeline schedules and axes", "DualPipeV", "tp", "75%"),
        ("Pipeline schedules and axes", "1F1B", "tp", "25%"),
        ("Choices and axes", "recompute full", "dp_shard", "50%"),
        ("Choices and axes", "cp by ulysses", "cp", "*untested*"),
        ("Choices and axes", "reshard in groups", "pp", "–"),
        ("Choices and pipeline schedules", "reshard always", "ZBVZeroBubble", "–"),
    ],
)
def test_a_pair_has_its_mark(title: str, row: str, column: str, mark: str) -> None:
    assert cell(PAGE, title, row, column) == mark


def test_what_cannot_meet_has_its_reason() -> None:
    [line] = [line for line in PAGE.splitlines() if "ZBVZeroBubble with reshard always" in line]
    assert "layout.reshard_after_forward" in line


def test_the_page_says_how_it_was_made() -> None:
    introduction = PAGE.split("## Axes")[0]
    assert "on 2026-01-02 by `meshwright prove job.toml` (torch 2.13.0)" in introduction
    assert "secret" not in PAGE
    assert "| `pp=2,tp=2` | 4 |" in PAGE


def test_the_page_says_whether_buffers_were_compared() -> None:
    assert "so were the persistent buffers of each rank after the last step" in " ".join(PAGE.split())
    mixed = matrix_page(proof().replace(precision="mixed"), "meshwright prove job.toml")
    assert "persistent buffers were not" in mixed


def test_the_covering_set_leaves_nothing_between_axes_and_schedules_untested() -> None:
    layouts = covering_layouts(resolve_architecture(JOB.model))
    proofs = [proven(layout_text(layout)) for layout in layouts]
    pairs = [(a, b) for a in (*AXES, *PIPELINES, *CHOICES) for b in AXES if a is not b]
    untested = [
        f"{a.name} with {b.name}"
        for a, b in pairs
        if (met := combination(JOB, proofs, a, b)).worst is None and met.impossible is None
    ]
    print(untested)
    assert not untested
