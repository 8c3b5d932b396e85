"""What pulls and pushes of a parameter server cost, beside plain messages, torch's sgd and torch.distributed.rpc.

    mpirun -n 2 python benchmarks/push_pull.py
    mpirun -n 3 python benchmarks/push_pull.py --servers 2

One worker, in turns with its peers within one run, each rank on a core of its own. Dense: the bandwidth of plain
messages between the same ranks, of the same memory, waited for in the same way. A push is received, aggregated and
applied by sgd, and over when a pull has seen it; its bound is the transfer and then a step of torch's sgd. Rows: of a
table on one server, by hpctrain and by torch.distributed.rpc in the same two processes; an answer of rpc to a push says
that it was applied, so it needs no pull.
"""

import statistics
import sys

import figures

ITEMSIZE = 4  # bytes of a float32
GOALS = {"pull": 0.80, "push": 0.70, "rows pulled": 3.0, "rows pushed": 3.0}

DENSE = f"{'pair':<6}{'plain down':>13}{'plain up':>13}{'sgd':>13}{'pull':>13}{'push':>13}{'pull':>9}{'push':>9}"
SPARSE = f"{'pair':<6}{'pull':>13}{'rpc pull':>13}{'push':>13}{'rpc push':>13}{'pulled':>10}{'pushed':>10}"


def with_shares(pair: dict[str, float]) -> dict[str, float]:
    """A dense pair, and how near it comes to bandwidth and bound."""
    return {**pair, "pull_share": pair["down"] / pair["pull"], "push_share": (pair["up"] + pair["sgd"]) / pair["push"]}


def with_ratios(pair: dict[str, float]) -> dict[str, float]:
    """A pair of rows, and how many times as long rpc takes."""
    return {**pair, "pull_ratio": pair["rpc_pull"] / pair["pull"], "push_ratio": pair["rpc_push"] / pair["push"]}


def dense_line(number: int, pair: dict[str, float]) -> str:
    seconds = "".join(f"{1000 * pair[name]:>10.2f} ms" for name in ("down", "up", "sgd", "pull", "push"))
    return f"{number:<6}{seconds}{pair['pull_share']:>9.1%}{pair['push_share']:>9.1%}"


def sparse_line(number: int, pair: dict[str, float]) -> str:
    seconds = "".join(f"{1000 * pair[name]:>10.3f} ms" for name in ("pull", "rpc_pull", "push", "rpc_push"))
    return f"{number:<6}{seconds}{pair['pull_ratio']:>10.2f}{pair['push_ratio']:>10.2f}"


def ratios(dense: list[dict], sparse: list[dict]) -> dict[str, list[float]]:
    """What has a goal, over all pairs."""
    keys = {"pull": "pull_share", "push": "push_share", "rows pulled": "pull_ratio", "rows pushed": "push_ratio"}
    found = {what: [pair[key] for pair in (dense if "share" in key else sparse)] for what, key in keys.items()}
    return {what: values for what, values in found.items() if values}


def summary(found: dict[str, list[float]]) -> list[str]:
    beside = {"pull": "of the bandwidth", "push": "of the bound"}
    told = []
    for what, values in found.items():
        middle = f"{statistics.median(values):.3f} {beside.get(what, 'times rpc')}"
        told.append(f"{what}: {middle}, with {figures.told(values, 3)}")
    return told


def faults(found: dict[str, list[float]]) -> list[str]:
    """What --check finds."""
    medians = {what: statistics.median(values) for what, values in found.items()}
    return [
        f"{what}: {median:.3f}, at least {GOALS[what]:.2f} was asked for"
        for what, median in medians.items()
        if median < GOALS[what]
    ]


def parse(argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("push_pull.py", __doc__.splitlines()[0], rank)
    sizes = {"servers": 1, "mib": 64, "rows": 200_000, "width": 64, "ids": 4096}
    for name, default in {**sizes, "pairs": 7, "repeats": 4, "sparse-repeats": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--bytes", action="store_true", help="only count the bytes of a round, beside those of a ring")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    if num_ranks < 2:
        raise ValueError("one rank has no server; start it by mpirun -n 2")
    for name in (*sizes, "pairs", "repeats", "sparse-repeats"):
        if (value := getattr(flags, name.replace("-", "_"))) < 1:
            raise ValueError(f"--{name} {value}: expected a whole number >= 1")
    if flags.servers >= num_ranks or not flags.bytes and flags.servers != num_ranks - 1:
        raise ValueError(f"--servers {flags.servers}: expected one worker beside them, these are {num_ranks} ranks")
    if flags.ids > flags.rows:
        raise ValueError(f"--ids {flags.ids}: the table has --rows {flags.rows}")
    return flags


def run(flags, comm, tell) -> tuple[dict, list[str]]:
    """All figures, and what --check finds. Collective."""
    figures.check_memory("--mib", 4 * flags.mib << 20, comm)  # weights and gradients, sent and received
    if not flags.bytes:
        figures.check_memory("--rows", 2 * ITEMSIZE * flags.rows * flags.width, comm)  # by hpctrain and by rpc
    import served

    from hpctrain.train.service import TableShape

    cores, num_elements = figures.pin(comm.rank), flags.mib * (1 << 20) // ITEMSIZE
    if flags.bytes:
        return count(flags, comm, tell, num_elements)
    tell(f"1 worker, {flags.servers} servers; {cores} cores; {flags.mib} MiB dense")
    tell(DENSE, flush=True)
    dense, sparse = [], []
    for number in range(flags.pairs):
        pair = served.dense_pair(comm, flags.servers, num_elements, flags.repeats, number % 2 == 0)
        if comm.rank == 0:
            dense.append(with_shares(pair))
            tell(dense_line(number + 1, dense[-1]), flush=True)
    if flags.servers == 1:
        table = TableShape("rows", flags.rows, flags.width)
        tell(f"{flags.ids} rows of {flags.width} out of {flags.rows}")
        tell(SPARSE, flush=True)
        pairs = served.sparse_pairs(comm, table, flags.ids, flags.sparse_repeats, flags.pairs)
        sparse = [with_ratios(pair) for pair in pairs]
        tell(*(sparse_line(number, pair) for number, pair in enumerate(sparse, 1)), sep="\n")
    found = ratios(dense, sparse)
    tell(*summary(found), sep="\n")
    told = comm.bcast(faults(found)) if flags.check else []
    return {"dense": dense, "sparse": sparse}, told


def count(flags, comm, tell, num_elements: int) -> tuple[dict, list[str]]:
    """The table of bytes. Collective."""
    import traffic

    num_workers = comm.size - flags.servers
    by_formula = traffic.formula(num_workers, flags.servers, comm.size, num_elements * ITEMSIZE)
    by_count = traffic.counted(comm, flags.servers, num_elements)
    tell(
        f"bytes of a round: {num_workers} workers, {flags.servers} servers, {flags.mib} MiB; ring of {comm.size} ranks"
    )
    tell(*traffic.lines(by_formula, by_count), sep="\n")
    return {"formula": by_formula._asdict(), "counted": by_count._asdict()}, []


if __name__ == "__main__":
    sys.exit(figures.main("push_pull.py", parse, run, sys.argv[1:]))
