"""The process that exports the checkpoints of a run while it trains; see meshwright.checkpoint.background.step_worker.

An export is removed with its checkpoint. A killed one leaves a temporary folder, which the next process removes.
"""

from typing import Any

import torch

from meshwright.checkpoint.background.helper_process import serve_steps
from meshwright.checkpoint.format.durable import remove_stale
from meshwright.checkpoint.hf.export import ExportFormat, export
from meshwright.spec.run.run import Run


def main(options: dict[str, Any]) -> None:
    """Export the steps that arrive on standard input as RUN/exports/step-N, until it ends."""
    # The cores are the training's.
    torch.set_num_threads(1)
    run, weights = Run(options["run"]), ExportFormat(options["dtype"])
    if run.exports.is_dir():
        remove_stale(run.exports)

    def act(step: int) -> int:
        return export(run.folder, run.export(step), step=step, weights=weights).num_bytes

    serve_steps(options["niceness"], act)
