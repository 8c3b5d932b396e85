"""A result is computed once for all who share a folder, also where some come while it is being computed."""

import threading

import pytest

from tests.harness.once import Once


def test_without_a_folder_each_computes():
    once, calls = Once(), []
    assert [once("a", lambda: calls.append(1) or 5) for _ in range(2)] == [5, 5] and len(calls) == 2


def test_with_a_folder_one_computes_while_the_others_wait(tmp_path):
    once, calls, begun, may_end, results = Once(), [], threading.Event(), threading.Event(), []
    once.folder = tmp_path

    def compute():
        calls.append(1)
        begun.set()
        may_end.wait()
        return {"x": [1.5]}

    def first_and_second():
        results.append(once("a", compute))

    threads = [threading.Thread(target=first_and_second) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    assert once("b", lambda: 7) == 7 and not results  # another key waits for nobody
    may_end.set()
    for thread in threads:
        thread.join()
    assert results == 3 * [{"x": [1.5]}] and len(calls) == 1


def test_whoever_waits_hears_of_a_failure(tmp_path):
    once = Once()
    once.folder = tmp_path
    with pytest.raises(ZeroDivisionError):
        once("a", lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="another rank could not compute a"):
        once("a", lambda: 5)
