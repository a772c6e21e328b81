"""adapter_of: what a measured run trains: all parameters, or an adapter on a frozen base."""

import re

from meshwright.evaluation.dataset.row import RunRow
from meshwright.spec.step.adapter import ALL_LINEAR_LAYERS, Adapter

ATTENTION_LAYERS = ("blocks.*.attention.*",)
_ADAPTER = re.compile(r"\b(?P<kind>lora|dora)\b(?P<rest>[^;,]*)", re.IGNORECASE)
_RANK = re.compile(r"\b(?:r|rank)\s*=?\s*(?P<rank>\d+)")
_SEVERAL = re.compile(r"\b(?P<number>\d+) concurrent adapters")


def adapter_of(row: RunRow, assumed: list[str]) -> Adapter:
    """Return what the cell `adapter` says, such as "lora r=16 (attention)", or else the remark in `notes`; of kind
    "none" where neither names LoRA or DoRA.

    Of layers only "(attention)" is known; without it all linear layers are taken, which is noted in `assumed`.
    """
    text = row.text("adapter") or row.text("notes")
    found = _ADAPTER.search(text)
    if found is None:
        return Adapter()
    changes: dict[str, object] = {"kind": found["kind"].lower()}
    if rank := _RANK.search(found["rest"]):
        changes["rank"] = int(rank["rank"])
    else:
        assumed.append(f"adapter.rank={Adapter().rank}")
    if "(attention)" in found["rest"].lower():
        changes["targets"] = ATTENTION_LAYERS
    else:
        assumed.append("adapters of all linear layers but experts")
        changes["targets"] = ALL_LINEAR_LAYERS
    if several := _SEVERAL.search(text):
        assumed.append(f"one adapter in place of {several['number']} that tokens are shared out to")
    return Adapter.model_validate(changes)
