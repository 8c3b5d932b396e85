"""Parameters that are one: which names mean the same tensor, also where it has copies on several stages."""

from collections.abc import Iterable, Mapping


def tie_sets(pairs: Iterable[tuple[str, str]], shapes: Mapping[str, list[int]]) -> list[list[str]]:
    """Joins pairs of names that share one: each set in model order, the name that stands for it first.

    `shapes` are those of all parameters of the model, by name, in model order. ValueError, one line, for a name that is
    none, and for parameters of different shapes.
    """
    sets: dict[str, set[str]] = {}
    for kept, other in pairs:
        for name in (kept, other):
            if name not in shapes:
                raise ValueError(f"--task: ties() names {name}, which is no parameter; there is {', '.join(shapes)}")
        if list(shapes[kept]) != list(shapes[other]):
            both = f"{list(shapes[kept])} and {list(shapes[other])}"
            raise ValueError(f"--task: ties() names {kept} and {other}, of shapes {both}; they should be equal")
        joined = sets.get(kept, {kept}) | sets.get(other, {other})
        sets.update(dict.fromkeys(joined, joined))
    order = {name: place for place, name in enumerate(shapes)}
    distinct = {id(each): each for each in sets.values() if len(each) > 1}
    return sorted((sorted(each, key=order.__getitem__) for each in distinct.values()), key=lambda s: order[s[0]])
