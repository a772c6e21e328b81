"""Whether a name map fits a model's tensors: each has one place in a Hugging Face folder, and no row is left over."""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.spec.model.hf.name_map import NameMap, Part, Rename, their_name
from meshwright.units import first_of

Shapes = Mapping[str, tuple[int, ...]]
Rows = Mapping[str, Sequence[Rename]]
_NUM_NAMED = 4


def name_map_problems(table: NameMap, shapes: Shapes) -> list[str]:
    """Return why `table` does not fit tensors of these shapes, one sentence each; [] where it does.

    Where it does, every tensor has its names in a folder, none has another's, and parts and layouts fit the sizes.
    """
    rows = {name: table.find_rows(name) for name in shapes}
    used = {row for found in rows.values() for row in found}
    problems = []
    if without := [name for name, found in rows.items() if not found]:
        problems.append(f"no row names {first_of(without, _NUM_NAMED)}: add a Rename")
    problems += [
        f"{_text(row)} names no tensor: correct it, or leave it out" for row in table.renames if row not in used
    ]
    problems += [
        f"Drop({drop.theirs!r}): copy_of = {drop.copy_of!r} is no tensor of the model that is one of theirs: correct it"
        for drop in table.drops
        if drop.copy_of is not None and not _is_one_of_theirs(rows.get(drop.copy_of, ()))
    ]
    misfits = [text for name, found in rows.items() for row in found if (text := _misfit(name, row, shapes[name]))]
    misfits += [text for name, found in rows.items() if (text := _incomplete_parts_of_ours(name, found))]
    # What tensors make up together is known where each fits.
    return list(dict.fromkeys([*problems, *(misfits or _collisions(table, rows, shapes))]))


def _is_one_of_theirs(rows: Sequence[Rename]) -> bool:
    return len(rows) == 1 and not rows[0].is_stacked and rows[0].part is None


def _misfit(name: str, row: Rename, shape: tuple[int, ...]) -> str | None:
    """Return why the layout of `row` does not fit a tensor of ours."""
    sizes, where = list(shape[row.is_stacked :]), f"{_text(row)}: {name} is {list(shape)}"
    if row.is_stacked and not shape:
        return f"{where}, which has no dim of experts: leave {{e}} out"
    if (part := row.our_part) is not None:
        if part.dim >= len(sizes) or sizes[part.dim] % sum(part.shares):
            return f"{where}, whose dim {part.dim} is not {sum(part.shares)} equal shares: correct our_part"
        sizes[part.dim] = sizes[part.dim] // sum(part.shares) * part.shares[part.index]
    heads = row.our_interleaved_heads if row.interleaved_heads is None else row.interleaved_heads
    if heads is not None and (not sizes or heads < 1 or sizes[0] % (2 * heads)):
        return f"{where}, whose rows are not {heads} heads of an even size: correct the number of heads"
    if row.is_transposed and len(sizes) < 2:
        return f"{where}, which is no matrix: leave is_transposed out"
    if row.is_transposed:
        sizes[-2:] = reversed(sizes[-2:])
    if (part := row.part) is not None and (part.dim >= len(sizes) or sizes[part.dim] % part.shares[part.index]):
        return f"{where}, whose dim {part.dim} in theirs is not {part.shares[part.index]} equal shares: correct part"
    return None


def _incomplete_parts_of_ours(name: str, rows: Sequence[Rename]) -> str | None:
    problem = _incomplete([row.our_part for row in rows if row.our_part is not None])
    if len({row.is_stacked for row in rows}) > 1:
        problem = "some of its parts are of experts"
    return f"{name}: {problem}: correct our_part of its rows" if problem else None


def _collisions(table: NameMap, rows: Rows, shapes: Shapes) -> Iterator[str]:
    """Yield where several of our tensors have one name of theirs, and are not the parts that make it up."""
    places: dict[str, list[tuple[str, Rename]]] = {}
    for name, found in rows.items():
        for row in found:
            places.setdefault(their_name(row, name), []).append((name, row))
    for theirs, of_one in places.items():
        names = first_of([name for name, _ in of_one], _NUM_NAMED)
        parts = [row.part for _, row in of_one if row.part is not None]
        wholes = {(shapes[name][: row.is_stacked], row.their_shape(shapes[name])) for name, row in of_one}
        problem = _incomplete(parts)
        if problem is None and len(wholes) > 1:
            problem = f"their sizes make up {' or '.join(str(list(sizes)) for _, sizes in sorted(wholes))}"
        if len(parts) < len(of_one) > 1:
            yield f"{theirs} is the name of {names}: give each a name of its own, or a part"
        elif problem is not None:
            yield f"{theirs}, which {names} make up: {problem}: correct part of their rows"
        elif (drop := table.drop_of(theirs)) is not None:
            yield f"Drop({drop.theirs!r}) matches {theirs}, the name of {names}: let it match other names only"


def _incomplete(parts: Sequence[Part]) -> str | None:
    """Return why these are not all parts of one tensor, each once."""
    if len({(part.shares, part.dim) for part in parts}) > 1:
        return "the shares or dims of its parts differ"
    found, expected = sorted(part.index for part in parts), [*range(len(parts[0].shares) if parts else 0)]
    return None if found == expected else f"of its parts {expected} there are {found}"


def _text(row: Rename) -> str:
    return f"Rename({row.ours!r}, {row.theirs!r})"
