"""What a reader of the table is told."""

import io
from typing import Any

import pytest
from rich.console import Console

from meshwright.prover.record import plant
from meshwright.prover.table import changes_text, difference_text, notes, proof_table, reasons, verdict, worst_text
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.proof import FAULTS, Change, Difference, DifferenceKind, LayoutProof, Proof


def difference(kind: DifferenceKind, relative: float, name: str = "blocks.0.ffn.up.weight") -> Difference:
    return Difference(kind=kind, name=name, step=2, relative=relative, bar=1e-5)


def layout_proof(gradient: float = 3e-7, **fields: Any) -> LayoutProof:
    values: dict[str, Any] = {
        "layout": Layout(tp=2),
        "differences": (difference("loss", 0.0, ""), difference("gradient", gradient), difference("weight", 1e-7)),
        "took_s": 1.25,
    }
    return LayoutProof(**(values | fields))


def proof(*layouts: LayoutProof, **fields: Any) -> Proof:
    values: dict[str, Any] = {
        "job": Job(),
        "changes": (Change(key="num_layers", original="32", proven="2"),),
        "num_steps": 3,
        "num_parameters": 34_000,
        "precision": "float32",
        "layouts": layouts,
        "date": "2026-01-01",
        "versions": {},
        "took_s": 4.0,
    }
    return Proof(**(values | fields))


def printed(shown: Proof) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(proof_table(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("relative", "text"),
    [(0.0, "equal"), (3.14e-7, "3.1e-07 (3%)"), (2e-5, "2.0e-05 (200%)"), (0.5, "5.0e-01 (5e+04 x)")],
)
def test_a_difference_stands_beside_the_share_of_its_bar(relative: float, text: str) -> None:
    assert difference_text(difference("loss", relative)) == text


def test_a_layout_that_holds() -> None:
    one = layout_proof()
    assert (verdict(one), reasons(one)) == ("holds", "")
    assert worst_text(one) == "gradient of blocks.0.ffn.up.weight, step 2"
    shown = proof(one)
    assert shown.holds
    assert "tp=2" in printed(shown)
    assert notes(shown)[-1] == "1 layout, 3 steps in float32: all hold; 4 s."


@pytest.mark.parametrize(
    ("one", "word", "text"),
    [
        (layout_proof(gradient=2e-5), "WRONG", "gradient not that of one process"),
        (layout_proof(problem="copies differ"), "WRONG", "copies differ"),
        (layout_proof(repeats=False), "WRONG", "another run gives other bits"),
        (layout_proof(differences=(), problem="rank 1: ValueError: no"), "FAILS", "rank 1: ValueError: no"),
    ],
)
def test_a_layout_that_does_not_hold_says_why(one: LayoutProof, word: str, text: str) -> None:
    assert (verdict(one), reasons(one)) == (word, text)
    shown = proof(layout_proof(), one)
    assert not shown.holds
    assert notes(shown)[0] == f"tp=2: {text}"
    assert notes(shown)[-1].endswith("1 of 2 do not hold; 4 s.")
    assert word in printed(shown)


def test_equal_bits_in_a_second_run_are_told() -> None:
    assert "each twice with equal bits" in notes(proof(layout_proof(repeats=True)))[-1]


def test_a_planted_fault_is_named_with_whether_it_was_found() -> None:
    assert f"planted in tp, and found: {FAULTS['tp']}." in notes(proof(layout_proof(gradient=1.0), planted="tp"))[2]
    assert "planted in tp, and NOT found" in notes(proof(layout_proof(), planted="tp"))[1]


def test_what_was_made_smaller_is_told() -> None:
    assert changes_text(proof(layout_proof())) == "34k parameters: num_layers 32 -> 2"


@pytest.mark.parametrize("axis", FAULTS)
def test_a_fault_in_an_axis_that_is_not_there_touches_nothing(axis: Any) -> None:
    class Untouchable:
        layout = Layout()

    assert getattr(Layout(), axis) == 1
    plant(axis, Untouchable())  # type: ignore[arg-type]


def test_a_proof_survives_json() -> None:
    original = proof(layout_proof(), layout_proof(gradient=1e300, problem="x"))
    assert Proof.from_json(original.to_json()) == original
