"""The OSU-style benchmarks: the format that scripts read, flags, wrong elements, and a launch of each."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.harness.launch import ROOT, run_mpi

SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("osu_*.py"))
NAMES = [name for name in SCRIPTS if "TEST = " in (ROOT / f"benchmarks/{name}.py").read_text()]
HEADS = {
    "osu_latency": "OSU MPI Latency Test",
    "osu_multi_lat": "OSU MPI Multi Latency Test",
    "osu_bw": "OSU MPI Bandwidth Test",
    "osu_bibw": "OSU MPI Bi-Directional Bandwidth Test",
    "osu_mbw_mr": "OSU MPI Multiple Bandwidth / Message Rate Test",
    "osu_allreduce": "OSU MPI Allreduce Latency Test",
    "osu_reduce_scatter": "OSU MPI Reduce_scatter Latency Test",
    "osu_allgather": "OSU MPI Allgather Latency Test",
    "osu_bcast": "OSU MPI Broadcast Latency Test",
    "osu_barrier": "OSU MPI Barrier Latency Test",
}
DEVICE = "asks for buffers on the device, which are of --buffer cupy"


def names_of(name):
    """What a script and the skeleton define, which find their neighbours as when they are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        found = SimpleNamespace(**runpy.run_path(str(ROOT / f"benchmarks/{name}.py")))
        return found, sys.modules["osu"]


@pytest.fixture(scope="module")
def osu():
    return names_of("osu_latency")[1]


def test_there_is_one_of_each():
    assert set(NAMES) == HEADS.keys()


@pytest.mark.parametrize("name", HEADS)
def test_titles_are_those_of_osu(name):
    found, _ = names_of(name)
    assert found.TEST.name == name and found.TEST.title == HEADS[name]


@pytest.mark.parametrize(
    "argv, ranks, line",
    [
        ("", 1, "1 rank; two ranks would do, as mpirun -n 2"),
        ("", 3, "3 ranks; two ranks would do, as mpirun -n 2"),
        ("-m 8:4", 2, "--message-size 8:4: expected MIN:MAX in bytes, such as 4:1048576"),
        ("-m few", 2, "--message-size few: expected MIN:MAX in bytes, such as 4:1048576"),
        ("-m -4:8", 2, "-m/--message-size: expected one argument"),
        ("-i 0", 2, "--iterations 0: expected a whole number >= 1"),
        ("-x -1", 2, "--warmup -1: expected a whole number >= 0"),
        ("--algorithm ring", 2, "--algorithm: invalid choice: 'ring' (choose from 'mpi')"),
        ("D", 2, "D: expected two words, such as D D or H D"),
        ("H X", 2, "H X: expected two words, such as D D or H D"),
        ("-m 0", 3, "3 ranks; two ranks would do, as mpirun -n 2"),
        ("--buffer torch -d cuda", 2, f"--buffer torch: -d cuda {DEVICE}"),
        ("--buffer numpy H D", 2, f"--buffer numpy: H D {DEVICE}"),
        ("--buffer list", 2, "--buffer: invalid choice: 'list' (choose from 'numpy', 'torch', 'cupy')"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(osu, argv, ranks, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        osu.parse(names_of("osu_latency")[0].TEST, argv.split(), ranks)


def test_pairs_want_an_even_number_and_a_window_a_message(osu):
    test = names_of("osu_mbw_mr")[0].TEST
    with pytest.raises(ValueError, match="^3 ranks; an even number of ranks would do"):
        osu.parse(test, [], 3)
    with pytest.raises(ValueError, match="^--window-size 0: expected a whole number >= 1"):
        osu.parse(test, ["-W", "0"], 4)


@pytest.mark.parametrize(
    "name, argv, line",
    [
        ("osu_allreduce", "--algorithm auto -d cuda", "-d cuda expected mpi or ring or host"),
        ("osu_allreduce", "--algorithm windows --buffer cupy", "--buffer cupy expected mpi or ring or host"),
    ],
)
def test_not_every_algorithm_takes_memory_of_a_device(osu, name, argv, line):
    words = f"^--algorithm {argv.split()[1]}: takes memory of the host only, beside {line}$"
    with pytest.raises(ValueError, match=words):
        osu.parse(names_of(name)[0].TEST, argv.split(), 2)


@pytest.mark.parametrize("argv", ["", "--buffer torch", "H H"])
def test_only_memory_of_a_device_is_copied_through_the_host(osu, argv):
    with pytest.raises(ValueError, match="^--algorithm host: copies from the device and back; beside it expected"):
        osu.parse(names_of("osu_allreduce")[0].TEST, ["--algorithm", "host", *argv.split()], 2)


@pytest.mark.parametrize(
    "argv, on_device", [("D D", True), ("H D", True), ("-d cuda", True), ("H H", False), ("--buffer cupy H H", False)]
)
def test_where_buffers_are(osu, argv, on_device, monkeypatch):
    monkeypatch.setattr(sys.modules["osu_memory"], "check", lambda kind, asked: None)
    assert osu.parse(names_of("osu_bw")[0].TEST, argv.split(), 2).on_device == on_device


@pytest.mark.parametrize(
    "answers, words",
    [
        ([(True, ""), (True, "")], None),
        ([(True, ""), (False, "library: no")], r"D D: this MPI takes memory of the host only \(library: no; HPCTRAIN_"),
    ],
)
def test_an_mpi_that_takes_no_device_memory_on_a_rank_is_refused(osu, answers, words, monkeypatch):
    memory = sys.modules["osu_memory"]
    monkeypatch.setattr(memory, "ask", lambda comm: [("library", *answers[0])])
    comm = SimpleNamespace(allgather=lambda mine: [mine, answers[1]])
    if words is None:
        memory.check_aware("D D", comm)
    else:
        with pytest.raises(memory.figures.Refused, match=f"^{words}"):
            memory.check_aware("D D", comm)


def test_a_switch_that_cannot_be_understood_is_refused(osu, monkeypatch):
    memory = sys.modules["osu_memory"]
    monkeypatch.setattr(memory, "ask", lambda comm: memory.verdict(iter([1])))
    monkeypatch.setattr(memory, "verdict", lambda answers: int("maybe"))
    with pytest.raises(
        memory.figures.Refused, match="^-d cuda: this MPI takes memory of the host only .invalid literal"
    ):
        memory.check_aware("-d cuda", SimpleNamespace(allgather=lambda mine: [mine]))


def test_a_sum_through_the_host_is_copied_out_summed_and_copied_back(osu, monkeypatch):
    memory, done = sys.modules["osu_memory"], []
    there, pinned = np.arange(4, dtype=np.float32), np.empty(4, np.float32)
    array = SimpleNamespace(nbytes=16, get=lambda out: np.copyto(out, there), set=lambda host: np.copyto(there, host))
    monkeypatch.setattr(memory, "pinned", lambda nbytes: pinned[: nbytes // 4])
    monkeypatch.setattr(memory, "finish", lambda: done.append(there.tolist()))
    comm = SimpleNamespace(Allreduce=lambda how, host: np.multiply(host, 2, out=host))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import osu_collectives
    osu_collectives.through_host(SimpleNamespace(comm=comm), array)()
    assert done == [[0, 2, 4, 6]]


@pytest.mark.parametrize("flag", ("-m 8", "-c", "--plot a.png", "--buffer numpy", "-d cuda"))
def test_a_barrier_has_neither_sizes_nor_buffers(osu, flag):
    with pytest.raises(ValueError, match="^unrecognized arguments: "):
        osu.parse(names_of("osu_barrier")[0].TEST, flag.split(), 2)


@pytest.mark.parametrize("flags", ("-d cuda", "--buffer cupy", "D D"))
def test_a_device_that_is_not_there_is_said_before_anything_runs(osu, flags, monkeypatch):
    monkeypatch.setattr(sys.modules["osu_memory"].importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"^{flags}: cupy is not installed$"):
        osu.parse(names_of("osu_latency")[0].TEST, flags.split(), 2)


@pytest.mark.parametrize(
    "name, told, sizes",
    [
        ("osu_latency", "0:8", [0, 1, 2, 4, 8]),
        ("osu_latency", "5:7", [5]),
        ("osu_latency", "16", [0, 1, 2, 4, 8, 16]),
        ("osu_bcast", "100:399", [100, 200]),
        ("osu_bcast", "0:1", [0, 1]),
        ("osu_allreduce", "0:8", [4, 8]),
        ("osu_reduce_scatter", "5:40", [8, 16, 32]),
        ("osu_allreduce", "12:48", [12, 24, 48]),
    ],
)
def test_sizes_begin_with_the_least_and_double_and_a_sum_is_of_whole_elements(osu, name, told, sizes):
    assert osu.parse(names_of(name)[0].TEST, ["-m", told], 2).sizes == sizes


@pytest.mark.parametrize("name, told, least", [("osu_allreduce", "1:3", 4), ("osu_reduce_scatter", "5:7", 8)])
def test_a_range_without_a_size_is_refused(osu, name, told, least):
    line = f"--message-size {told}: holds no size, the first is {least} bytes; such as {least}:1048576"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        osu.parse(names_of(name)[0].TEST, ["-m", told], 2)


def test_a_line_is_what_scripts_read(osu):
    """A number of bytes at its beginning, then the figures, as expressions of others expect them."""
    test = names_of("osu_mbw_mr")[0].TEST
    flags = osu.parse(test, [], 4)
    row = {"size": 4194304, "MB/s": 12345.678, "Messages/s": 2943.4}
    assert re.search(r"^4194304\s+(\S+)\s+(\S+)$", osu.line(test, flags, row)).groups() == ("12345.68", "2943.40")
    head = osu.heading(test, flags, 4)
    assert head[:2] == [f"# {test.title}", "# [ pairs: 2 ] [ window size: 64 ]"]
    assert re.fullmatch(r"# Size\s+MB/s\s+Messages/s", head[2])
    full = osu.parse(test, ["-f"], 4)
    row |= {"min": 1.0, "max": 2.0, "iterations": 3, "p50": 1.0, "p99": 2.0}
    assert len(osu.line(test, full, row)) == len(osu.heading(test, full, 4)[2])


def test_wrong_elements_are_counted():
    memory = (names_of("osu_allreduce"), sys.modules["osu_memory"])[1]
    array = memory.Buffers("numpy", False, "float32").zeros("array", 4000)
    expected = np.arange(1000, dtype=np.float32)
    memory.fill(array, expected)
    assert memory.wrong(array, expected) == 0
    array[[3, 999]] += 1
    assert memory.wrong(array, expected) == 2


@pytest.mark.wide_if(case=lambda ranks: ranks == 4)
@pytest.mark.parametrize("ranks", (2, 4))
def test_every_benchmark_runs_and_finds_nothing_wrong(ranks, tmp_path):
    result = run_mpi(ranks, [sys.executable, ROOT / "tests/benchmarks/every_osu.py"], timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result
    expected = {name for name in HEADS if ranks == 2 or name not in ("osu_latency", "osu_bw", "osu_bibw")}
    assert {path.stem for path in tmp_path.glob("*.json")} == expected
    for name in expected:
        sizes = [20 * 2**i for i in range(9)]
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert [row["size"] for row in rows] == ([0] if name == "osu_barrier" else sizes)
        assert all(row.get("wrong", 0) == 0 and row["min"] <= row["max"] for row in rows)
        if name == "osu_allreduce":  # microseconds of all ranks' mean, so bytes a microsecond are MB/s
            assert all(row["algbw"] == pytest.approx(row["size"] / row["Avg Latency(us)"]) for row in rows)
            assert all(row["busbw"] == pytest.approx(row["algbw"] * 2 * (ranks - 1) / ranks) for row in rows)
    assert re.search(r"^# OSU MPI Allreduce Latency Test\n# Size\s+Avg Latency\(us\)", result.stdout, re.MULTILINE)
    assert re.search(r"^5120\s+[\d.]+\s", result.stdout, re.MULTILINE)


def planted(tmp_path, plant, *calls):
    """osu_allreduce on two ranks with each of these flags in turn, after a line that changes hpctrain."""
    script = tmp_path / "planted.py"
    script.write_text(
        "import importlib, runpy, sys\n"
        f"sys.path[:0] = [{str(ROOT / 'benchmarks')!r}, {str(ROOT)!r}]\n"
        "osu = importlib.import_module('osu')\n"
        f"{plant}\n"
        f"test = runpy.run_path({str(ROOT / 'benchmarks/osu_allreduce.py')!r})['TEST']\n"
        f"sys.exit([osu.main(test, each.split()) for each in {calls!r}][-1])\n"
    )
    return run_mpi(2, [sys.executable, script], timeout=60, cwd=tmp_path)


def test_room_that_is_not_there_is_told_once_and_before_the_table(tmp_path):
    plant = "from hpctrain.comm import shared_memory; shared_memory.shared_memory_free = lambda: 9 << 20"
    flags = "-m 4:4194304 -i 1 -x 0 --algorithm"
    result = planted(tmp_path, plant, f"{flags} auto", f"{flags} windows")
    assert result.returncode == 2, result
    told = [line for line in result.stderr.splitlines() if line.startswith(("hpctrain: ", "osu_"))]
    assert [" has 9 MiB free" in line for line in told] == [True, True, False], result
    assert told[2].startswith("osu_allreduce.py: --algorithm='windows': the ranks share no memory"), result
    assert result.stdout.count("# Size") == 1 and re.search(r"^4194304 ", result.stdout, re.MULTILINE), result


def test_an_element_that_is_wrong_fails_the_launch(tmp_path):
    """A ring that loses what rank 1 brings."""
    plant = "from hpctrain.comm.buffer import Buffer; Buffer.add = lambda self, start, received: None"
    result = planted(tmp_path, plant, "-m 64:64 -i 1 -x 0 -c --algorithm ring")
    assert result.returncode == 1, result
    assert re.search(r"^64\s+[\d.]+\s+32$", result.stdout, re.MULTILINE), result


def test_a_launch_without_mpi4py_says_so(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("raise ImportError('not here')\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = run_mpi(2, [sys.executable, ROOT / "benchmarks/osu_latency.py"], timeout=60, env=env)
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr, result
    assert "osu_latency.py: cannot start MPI: not here; pip install" in result.stderr, result
