"""The table of a tuning: what auto takes by either constants, and which size of buckets follows."""

from types import SimpleNamespace

from hpctrain.plan.allreduce import BUILT_IN, Constants
from hpctrain.tools.tune_sums import BETWEEN
from hpctrain.tools.tune_table import lines_of, step_lines

MESSAGES, SHARED = ["ring", "doubling"], ["windows", "staged"]


def test_the_table_shows_what_either_constants_take():
    sizes = [1 << 10, 1 << 20, 1 << 24]
    table = {name: dict.fromkeys(sizes, 0.002) for name in (*MESSAGES, *SHARED, *BETWEEN)}
    across = SimpleNamespace(size=4)
    ring = SimpleNamespace(size=8, spans_nodes=True, node=SimpleNamespace(across=across))
    lines = lines_of(table, Constants(60.0, 1e-15, 1 << 30, 1 << 12), ring)
    heads = "bytes ring ms doubling ms windows ms staged ms nodes ring ms nodes doubling ms"
    assert " ".join(lines[0].split()) == f"{heads} built in measured nodes built in nodes measured"
    cells = [line.split() for line in lines[1:4]]
    assert [row[0] for row in cells] == [str(size) for size in sizes] and cells[0][1:7] == ["2.000"] * 6
    assert cells[0][7:] == ["windows", "windows", "doubling", "doubling"]
    assert cells[1][7:] == ["windows", "doubling", "ring", "doubling"]
    assert cells[2][7:] == ["ring", "doubling", "ring", "doubling"]
    assert "         latency: 60 s (built in: 5e-05 s)" in lines
    assert "  largest_staged: 4096 bytes (built in: 4194304 bytes)" in lines
    ring = SimpleNamespace(size=8, spans_nodes=False, node=None)
    lines = lines_of({name: table[name] for name in MESSAGES}, BUILT_IN, ring)
    assert lines[1].split()[3:] == ["ring", "ring"]
    assert "these ranks share no memory: largest_staged stays as it is built in" in lines


def test_one_size_of_buckets_is_no_choice():
    assert step_lines({64: 0.5})[-1].startswith("this size alone, as all gradients fit in it")
    assert step_lines({64: 0.5, 256: 0.5})[-1].startswith("bucket bytes to take: 256, the largest of those within")
