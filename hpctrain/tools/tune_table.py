"""The table that people read of a tuning: times, and which algorithm `auto` takes with old and with new constants."""

from dataclasses import asdict

from hpctrain.comm.ring import Ring
from hpctrain.plan.allreduce import BUILT_IN, Constants, by_messages, choose
from hpctrain.plan.fit import best_bucket


def lines_of(table: dict[str, dict[int, float]], constants: Constants, ring: Ring) -> list[str]:
    """Milliseconds by size; what auto takes of an array that lies elsewhere, and between nodes; the constants."""
    ways = [
        lambda size, by: choose("auto", size, ring.size, "staged" in table, False, ring.spans_nodes, by),
    ]
    heads = ["built in", "measured"]
    if "nodes ring" in table:
        ways.append(lambda size, by: by_messages(size, ring.node.across.size, by))
        heads += ["nodes built in", "nodes measured"]
    lines = [
        f"{'bytes':>10}" + "".join(f"{name + ' ms':>18}" for name in table) + "".join(f"{head:>16}" for head in heads)
    ]
    for size in next(iter(table.values())):
        times = "".join(f"{1e3 * each[size]:>18.3f}" for each in table.values())
        chosen = "".join(f"{way(size, by):>16}" for way in ways for by in (BUILT_IN, constants))
        lines.append(f"{size:>10}{times}{chosen}")
    lines.append("built in, measured: what --allreduce auto takes by either constants, of an array that lies elsewhere")
    if "windows" in table:
        lines.append("arrays in memory that a node shares, such as gradients, it sums up there (windows)")
    if "staged" not in table:
        lines.append("these ranks share no memory: largest_staged stays as it is built in")
    old = asdict(BUILT_IN)
    for key, value in asdict(constants).items():
        measured, built_in = (
            f"{each:.3g} s" if isinstance(each, float) else f"{each} bytes" for each in (value, old[key])
        )
        lines.append(f"{key:>16}: {measured} (built in: {built_in})")
    return lines


def step_lines(steps: dict[int, float]) -> list[str]:
    """What the steps took, and which size of buckets follows."""
    lines = ["", f"{'bucket bytes':>12}  {'step ms':>10}"]
    lines += [f"{size:>12}  {1e3 * seconds:>10.2f}" for size, seconds in steps.items()]
    if len(steps) == 1:
        return [*lines, "this size alone, as all gradients fit in it or there is no room for another: none is written"]
    return [*lines, f"bucket bytes to take: {best_bucket(steps)}, the largest of those within 2 % of the fastest"]
