"""Look-up of saved shards on many ranks: which hold what a rank wants, and whether all fits.

Each tensor has a judge (see shards.py), which receives the shards that were saved of it and the boxes that ranks want.
It checks that the shards cover the tensor exactly once and that some rank wants it, and answers with the shards.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint.format.boxes import Box, intersection
from meshwright.checkpoint.format.manifest import RankManifest, remedy
from meshwright.checkpoint.format.saved import Saved, saved_from_list, saved_in, saved_to_list, uncovered
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.shards import Shard, judge_of
from meshwright.errors import CheckpointError, DamagedCheckpoint
from meshwright.units import first_of

_SAME_JOB = "set [model] and [optimizer] to what they were when it was saved"


class Wanted(NamedTuple):
    """What a rank fills: a box of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


def look_up(
    folder: Path,
    manifests: Iterable[RankManifest],
    shards: Sequence[Shard],
    sections: Collection[str],
    peers: GroupPeers,
) -> list[list[Saved]]:
    """Return the saved shards that overlap each of `shards`; raises on all ranks for a tensor that does not fit."""
    messages: list[tuple[list[Saved], list[Wanted]]] = [([], []) for _ in range(peers.num_ranks)]
    for saved in (saved for manifest in manifests for saved in saved_in(manifest, sections)):
        messages[judge_of(saved.name, peers.num_ranks)][0].append(saved)
    asked: list[list[int]] = [[] for _ in range(peers.num_ranks)]
    for position, shard in enumerate(shards):
        judge = judge_of(shard.name, peers.num_ranks)
        messages[judge][1].append(Wanted(shard.name, shard.dtype, shard.shape, shard.box))
        asked[judge].append(position)
    received = peers.exchange([[list(map(saved_to_list, saved)), wanted] for saved, wanted in messages])
    all_saved = [saved_from_list(each) for saved, _ in received for each in saved]
    wanted = [[_wanted_from_list(each) for each in of_rank] for _, of_rank in received]
    _raise_differences(folder, peers.gather(_differences(all_saved, [each for of_rank in wanted for each in of_rank])))
    answers = peers.exchange(_answers(all_saved, wanted))
    found: list[list[Saved]] = [[] for _ in shards]
    for positions, answer in zip(asked, answers, strict=True):
        for position, parts in zip(positions, answer, strict=True):
            found[position] = [saved_from_list(part) for part in parts]
    return found


def _answers(saved: Sequence[Saved], wanted: Sequence[Sequence[Wanted]]) -> list[list[list[Any]]]:
    """Return, by rank and wanted box, the saved shards that overlap it, as lists."""
    by_name: dict[str, list[Saved]] = defaultdict(list)
    for each in saved:
        if each.shard is not None:
            by_name[each.name].append(each)
    return [
        [
            [
                saved_to_list(part)
                for part in by_name[want.name]
                if part.shard is not None and intersection(part.shard.box, want.box) is not None
            ]
            for want in of_rank
        ]
        for of_rank in wanted
    ]


def _differences(saved: Sequence[Saved], wanted: Sequence[Wanted]) -> dict[str, list[str]]:
    """Return how what is saved differs from what the ranks want, for the tensors of one judge."""
    kinds = {each.name: (each.dtype, each.shape) for each in saved}
    names = {want.name for want in wanted}
    different = {
        f"{want.name} (saved {kinds[want.name][0]} {list(kinds[want.name][1])}, now {want.dtype} {list(want.shape)})"
        for want in wanted
        if want.name in kinds and (want.dtype, want.shape) != kinds[want.name]
    }
    return {
        "uncovered": uncovered(saved),
        "missing": [name for name in names if name not in kinds],
        "different": list(different),
        "unused": [name for name in kinds if name not in names],
    }


def _raise_differences(folder: Path, of_judges: Sequence[Mapping[str, list[str]]]) -> None:
    """Raise what all judges found, if anything; the same on every rank."""
    found = {kind: sorted(each for judge in of_judges for each in judge[kind]) for kind in of_judges[0]}
    if found["uncovered"]:
        raise DamagedCheckpoint(f"{folder} is incomplete: {first_of(found['uncovered'])}: {remedy(folder)}")
    texts = {
        "missing": "{folder} lacks {names}, which this model or its optimizer has: {fix}",
        "different": "{folder} was saved with other sizes: {names}: {fix}",
        "unused": "{folder} holds {names}, which this model or its optimizer lacks: {fix}",
    }
    lines = [
        text.format(folder=folder, names=first_of(found[kind]), fix=_SAME_JOB)
        for kind, text in texts.items()
        if found[kind]
    ]
    if lines:
        raise CheckpointError("\n".join(lines))


def _wanted_from_list(values: Sequence[Any]) -> Wanted:
    name, dtype, shape, (offsets, sizes) = values
    return Wanted(name, dtype, tuple(shape), Box(tuple(offsets), tuple(sizes)))
