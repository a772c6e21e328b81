"""`meshwright prove`: runs one process and layouts on local ranks, and compares what they train."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.result_command import print_result, result_command
from meshwright.log import progress

if TYPE_CHECKING:
    from meshwright.spec.run.proof import LayoutProof


@result_command
@click.argument("job_file", type=click.Path())
@click.argument("words", nargs=-1, metavar="[LAYOUT]... [SECTION.KEY=VALUE]...")
@click.option("--steps", type=int, default=3, show_default=True, help="Optimizer steps to compare.")
@click.option("--exact", is_flag=True, help="Compute in float64: rounding then hides no mistake, however small.")
@click.option("--mixed", is_flag=True, help="Compute in bfloat16 over float32 masters, as most training does.")
@click.option("--repeat", is_flag=True, help="Run each layout twice, which must give the same bits.")
@click.option("--plant", type=click.Choice(["tp", "cp", "pp", "ep", "dp"]), help="Break this axis; it must be found.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="What ranks use.")
@click.option("--timeout", "timeout_s", type=float, default=300.0, show_default=True, help="Seconds for a layout.")
@click.option("--max-ranks", type=int, default=64, show_default=True, help="Processes that a layout may start.")
@click.option("--matrix", type=click.Path(dir_okay=False, path_type=Path), help="Write what composes as a page.")
def command(
    job_file: str,
    words: tuple[str, ...],
    steps: int,
    exact: bool,
    mixed: bool,
    repeat: bool,
    plant: str | None,
    device: str,
    timeout_s: float,
    max_ranks: int,
    matrix: Path | None,
    as_json: bool,
) -> None:
    """Prove that LAYOUTs (such as dp_shard=2,tp=2) train what one process trains, on local ranks.

    The model of JOB_FILE is made small, its architecture kept; losses, gradients and updated weights are compared by
    name. Without LAYOUTs a set is proven in which every pair of axes is combined. SECTION.KEY=VALUE sets a key of the
    job, as for train; keys of [layout] are joined by commas: cp=2,attention_backend=flash.

    Exit code 0: all agree; 2: bad input; 70: one does not.
    """
    from meshwright.app.job.jobs import load_job
    from meshwright.app.prove import layouts_of, prove, split_words
    from meshwright.cli.output_files import require_file
    from meshwright.errors import ConfigError, ExitCode
    from meshwright.prover.page import matrix_page

    if exact and mixed:
        raise ConfigError("--exact computes in float64 and --mixed in bfloat16: give one of them")
    if matrix is not None:
        require_file("--matrix", matrix)
    layouts, overrides = split_words(words)
    resolved = load_job(job_file, *overrides)
    asked = layouts_of(resolved, layouts)
    proof = prove(
        resolved,
        *asked,
        steps=steps,
        precision="float64" if exact else "mixed" if mixed else "float32",
        repeat=repeat,
        plant=plant,  # type: ignore[arg-type]
        device=device,  # type: ignore[arg-type]
        timeout_s=timeout_s,
        max_ranks=max_ranks,
        report=_progress(len(asked)),
    )
    if matrix is not None:
        matrix.write_text(matrix_page(proof, shlex.join(["meshwright", *sys.argv[1:]])), encoding="utf-8")
    print_result(proof, as_json)
    sys.exit(ExitCode.DONE if proof.holds else ExitCode.DO_NOT_RETRY)


def _progress(num_layouts: int) -> Callable[[LayoutProof], None]:
    from meshwright.prover.table import reasons, verdict
    from meshwright.spec.layout.layout_text import layout_text

    numbers = count(1)

    def show(one: LayoutProof) -> None:
        place = f"[{next(numbers)}/{num_layouts}]"
        what = f"{layout_text(one.layout)}: {verdict(one)}"
        why = "" if one.holds else f": {reasons(one)}"
        progress.info("%s %s%s (%.1f s)", place, what, why, one.took_s)

    return show
