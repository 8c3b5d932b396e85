"""Lines of many ranks on one screen: whole, prefixed, at once."""

import io
import subprocess
import sys
from pathlib import Path

from hpctrain.report.streams import PrefixedStream
from tests.harness.launch import ROOT

WRITER = """
import sys
from hpctrain.report.streams import PrefixedStream
stream = PrefixedStream(sys.stderr, f"[rank {sys.argv[1]}]")
for number in range(200):
    for piece in ("a line ", "in ", "pieces ", "x" * 300, f" {number}", chr(10)):
        print(piece, end="", file=stream)
"""


def test_every_line_has_its_prefix_however_it_was_written():
    screen = io.StringIO()
    stream = PrefixedStream(screen, "[rank 3]")
    print("one\ntwo", file=stream)
    print("th", end="", file=stream)
    assert screen.getvalue() == "[rank 3] one\n[rank 3] two\n"
    print("ree", file=stream)
    print("rest", end="", file=stream)
    stream.flush()
    assert screen.getvalue().endswith("[rank 3] three\n[rank 3] rest\n")


def test_a_log_comes_into_being_with_the_first_line(tmp_path):
    stream = PrefixedStream(io.StringIO(), "[rank 0]")
    print("before there is a folder", file=stream)
    stream.log = tmp_path / "logs" / "rank-0000.log"
    assert not stream.log.parent.exists()
    print("words", file=stream)
    assert stream.log.read_text() == "[rank 0] words\n"


def test_a_full_disk_under_the_log_does_not_stop_the_screen():
    screen = io.StringIO()
    stream = PrefixedStream(screen, "[rank 0]")
    stream.log = Path("/dev/full")
    print("one\ntwo", file=stream)
    assert screen.getvalue() == "[rank 0] one\n[rank 0] two\n" and stream.log is None


def test_lines_of_many_processes_stay_whole():
    command = [sys.executable, "-c", WRITER]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as screen:
        writers = [subprocess.Popen([*command, str(rank)], stderr=screen.stdin, cwd=ROOT) for rank in range(4)]
        screen.stdin.close()
        lines = screen.stdout.read().splitlines()
    assert [writer.wait() for writer in writers] == [0] * 4
    expected = {f"[rank {rank}] a line in pieces {'x' * 300} {number}" for rank in range(4) for number in range(200)}
    assert len(lines) == 800 and set(lines) == expected
