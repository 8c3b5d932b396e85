"""What a bound on staleness costs: how long workers wait for slow ones, and how fast the loss falls meanwhile.

    mpirun -n 8 python benchmarks/staleness.py

The last rank serves, all others train a small least-squares model on fixed data. Computing is a sleep, so workers need
no core of their own; in each round each of them is slow with some probability, by a seed. The same seeds go through a
simulation without messages: a clock of workers, and events. Then the same with one worker that is always slow.

With s = 0 a round is one step with the mean over all workers; otherwise each worker's gradient is a step of its own, at
the rate divided by their number, so that a round moves the weights about as far. The loss is that over all data at the
weights that worker 0 has just pulled, with the time since the beginning; losses are compared at the time at which
s = 8 had done all its rounds, or s = 0 if that was sooner.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import figures

if TYPE_CHECKING:
    from straggling import Course, Delays

BOUNDS = (0, 1, 3, 8, math.inf)
LEAST_AT_0, MOST_AT_8 = 0.40, 0.10  # what --check asks for: at least this, at most that
PERMANENT = "always"
SHARE_OF_ROUNDS = 5  # with a worker that is always slow: one in so many

HEADER = (
    f"{'worker is slow':<16}{'s':>5}{'simulated':>12}{'measured':>11}{'of the others':>15}{'seconds':>10}{'loss':>12}"
)


def line(row: dict) -> str:
    how, bound = row["slow"], row["bound"]
    shares = f"{row['simulated']:>12.1%}{row['measured']:>11.1%}{row['others']:>15.1%}"
    return f"{how:<16}{bound:>5}{shares}{row['seconds']:>9.1f}s{row['loss']:>12.2e}"


def loss_at(losses: list[tuple[float, float]], seconds: float) -> float:
    """The last one that was known by then; the first where none was."""
    known = [loss for when, loss in losses if when <= seconds]
    return known[-1] if known else losses[0][1]


def at_equal_time(rows: list[dict]) -> None:
    """Gives each row of random delays its loss at the same time."""
    ends = [row["seconds"] for row in rows if row["bound"] in ("0", "8")]
    for row in rows:
        row["loss"] = loss_at(row["losses"], min(ends))


def faults(rows: list[dict]) -> list[str]:
    """What --check finds, among the rows of random delays."""
    shares = {row["bound"]: row["measured"] for row in rows if row["slow"] != PERMANENT}
    losses = {row["bound"]: row["loss"] for row in rows if row["slow"] != PERMANENT}
    found = []
    if shares["0"] < LEAST_AT_0:
        found.append(f"s = 0: workers wait for {shares['0']:.1%} of the time, at least {LEAST_AT_0:.0%} was expected")
    if shares["8"] > MOST_AT_8:
        found.append(f"s = 8: workers wait for {shares['8']:.1%} of the time, at most {MOST_AT_8:.0%} was asked for")
    finite = [each for each in shares if each != "inf"]
    for one, other in zip(finite, finite[1:]):
        if shares[other] >= shares[one]:
            found.append(
                f"s = {other}: workers wait for {shares[other]:.1%}, no less than {shares[one]:.1%} at s = {one}"
            )
    if losses["8"] > losses["0"]:
        found.append(f"s = 8: a loss of {losses['8']:.2e} at equal time, above {losses['0']:.2e} at s = 0")
    return found


def parse(argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("staleness.py", __doc__.splitlines()[0], rank)
    add = parser.add_argument
    add("--rounds", type=int, default=500, metavar="N", help="of each bound; default: 500")
    add("--milliseconds", type=float, default=40, metavar="MS", help="that a gradient takes; default: 40")
    add("--slow", type=float, default=0.1, metavar="P", help="probability of a slow round; default: 0.1")
    add("--factor", type=float, default=4, metavar="F", help="how much longer it takes; default: 4")
    add("--seed", type=int, default=2, metavar="N", help="of the delays; default: 2, a typical one")
    add("--plot", metavar="FILE.png", help="draw the losses over time there")
    add("--json", metavar="FILE", help="write all figures there")
    add("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    if num_ranks < 3:
        there = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
        raise ValueError(f"{there}: two workers and a server are the least; start it by mpirun -n 8")
    if flags.rounds < SHARE_OF_ROUNDS:
        raise ValueError(f"--rounds {flags.rounds}: expected {SHARE_OF_ROUNDS} or more")
    if not 0 < flags.milliseconds < math.inf:
        raise ValueError(f"--milliseconds {flags.milliseconds:g}: expected more than 0")
    if not 0 <= flags.slow <= 1:
        raise ValueError(f"--slow {flags.slow:g}: expected a probability, from 0 to 1")
    if not 1 <= flags.factor < math.inf:
        raise ValueError(f"--factor {flags.factor:g}: expected 1 or more")
    if flags.seed < 0:
        raise ValueError(f"--seed {flags.seed}: expected 0 or more")
    return flags


def measure(flags, comm, delays: Delays, slow: str, bound: float, num_rounds: int) -> dict:
    """A row; its losses are those of worker 0. Collective."""
    from straggling import simulated_waiting, train

    course: Course = train(comm, delays, bound, num_rounds)
    others = course.shares[1:]
    return {
        "slow": slow,
        "bound": f"{bound:g}",
        "rounds": num_rounds,
        "simulated": sum(simulated_waiting(delays, bound, num_rounds)) / (comm.size - 1),
        "measured": sum(course.shares) / len(course.shares),
        "others": sum(others) / len(others),
        "seconds": course.seconds,
        "losses": course.losses,
        "loss": course.losses[-1][1],
    }


def run(flags, comm, tell) -> tuple[dict, list[str]]:
    """All figures, and what --check finds. Collective."""
    from straggling import Delays

    workers, seconds = comm.size - 1, flags.milliseconds / 1000
    tell(f"{workers} workers, 1 server; {flags.milliseconds:g} ms a gradient, {flags.factor:g} times as long when slow")
    tell(HEADER, flush=True)
    rows = []
    often = Delays(workers, seconds, flags.factor, flags.slow, flags.seed)
    for bound in BOUNDS:
        rows.append(measure(flags, comm, often, f"at {flags.slow:.0%}", bound, flags.rounds))
    at_equal_time(rows)
    tell(*map(line, rows), sep="\n", flush=True)
    for bound in BOUNDS:
        always = Delays(workers, seconds, flags.factor, 0.0, flags.seed, always=0)
        rows.append(measure(flags, comm, always, PERMANENT, bound, flags.rounds // SHARE_OF_ROUNDS))
        tell(line(rows[-1]), flush=True)
    share = 1 - 1 / flags.factor
    why = f"once the others are s rounds ahead they wait {share:.0%} of the time, whatever s is"
    tell(f"one that is always slow: {why}; only s = inf lets them go")
    if flags.plot and comm.rank == 0:
        draw(rows[: len(BOUNDS)], flags.plot)
    return {"rows": rows}, faults(rows) if flags.check else []  # all ranks have the same rows


def draw(rows: list[dict], file: str) -> None:
    """The loss over time, for each bound."""
    from matplotlib.figure import Figure

    figure = Figure((7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds", ylabel="loss over all data", yscale="log")
    for row in rows:
        axes.plot(*zip(*row["losses"]), label=f"s = {row['bound']}")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    sys.exit(figures.main("staleness.py", parse, run, sys.argv[1:]))
