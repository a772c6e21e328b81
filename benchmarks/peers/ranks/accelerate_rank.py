"""One rank of a loop by accelerate's rules, with DDP.

python -m benchmarks.peers.ranks.accelerate_rank FOLDER [compiled]

Compiled is by block, as accelerate names it (`use_regional_compilation`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch.utils.data import DataLoader

from benchmarks.peers.ranks.tokens import all_rows, build_adamw
from benchmarks.peers.ranks.transformers_model import as_batch, load_model
from benchmarks.peers.turns import Turns, read_task


def main() -> None:
    """Train until no turn is left."""
    folder, is_compiled = Path(sys.argv[1]), "compiled" in sys.argv[2:]
    task, turns = read_task(folder), Turns.of_environment()
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True) if is_compiled else None
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = load_model(folder)
    optimizer = build_adamw(model.parameters(), task)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(folder, task))
    for batch in loader:
        turns.next()
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), task["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        turns.loss = accelerator.gather(loss.detach()).mean()


def batches(folder: Path, task: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader of all ranks' sequences, in order: accelerate hands out batches to the ranks in turn."""
    rows = [as_batch(row) for row in all_rows(folder)]
    return DataLoader(rows, batch_size=task["microbatch_size"], shuffle=False)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
