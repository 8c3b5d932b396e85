"""Workers and servers without a model: what pulls see, what is refused, and that the job ends."""

from functools import partial
from math import inf

import numpy as np
import pytest
import torch

from hpctrain.comm import outbox
from hpctrain.comm.abort import RankFailed
from hpctrain.comm.messages import DENSE, FINISH, PUSH, PUSHED, Header
from hpctrain.comm.outbox import MOST_UNREAD
from hpctrain.plan.sharding import Segment
from hpctrain.train.service import ServiceSettings
from tests.train.serving import arena, on_ranks, pull_dense, serve


def gradient(worker: int, clock: int) -> torch.Tensor:
    """Numbers that are exact in any order."""
    _, size = arena()
    return torch.arange(size, dtype=torch.float64) % 7 + worker + 2 * clock


def padding() -> torch.Tensor:
    """False where the arena holds nothing."""
    segments, size = arena()
    used = torch.zeros(size, dtype=torch.bool)
    for _, start, stop in segments:
        used[start:stop] = True
    return used


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("num_servers", (1, 2, 3))
def test_a_round_is_one_update_of_the_mean_over_all_items(comm, num_servers):
    num_workers, rounds = min(3, comm.size - num_servers), 5
    if num_workers < 1 or (part := on_ranks(comm, num_workers, num_servers)) is None:
        return

    def work(client, worker):
        for clock in range(rounds):
            seen = pull_dense(client, clock)
            client.push(clock, worker + 1, 10.0 * worker, 0.125, gradient(worker, clock))
            client.wait_sent()
        notes = client.notes
        last = pull_dense(client, rounds)
        if worker == 0:
            client.progress.wait(lambda: client.poll() or len(notes) == rounds)
        return seen.tolist(), last.tolist(), list(notes)

    results, figures, _ = serve(part, num_servers, work)
    _, size = arena()
    weights, expected = 0.01 * torch.arange(size, dtype=torch.float64), []
    items = sum(worker + 1 for worker in range(num_workers))
    for clock in range(rounds):
        expected.append(weights.clone())
        mean = sum(gradient(worker, clock) for worker in range(num_workers)) * (1.0 / items)
        weights[padding()] -= 0.125 * mean[padding()]
    used = padding()
    for seen, last, _ in results:
        assert torch.equal(torch.tensor(seen, dtype=torch.float64)[used], expected[-1][used])
        assert torch.equal(torch.tensor(last, dtype=torch.float64)[used], weights[used])
    loss = sum(10.0 * worker for worker in range(num_workers))
    assert results[0][2] == [[clock, loss, items] for clock in range(rounds)]
    assert all(each["updates"] == rounds and each["clock_gaps"] == {"0": num_workers * 6} for each in figures)
    part.Free()


ROW_IDS = torch.tensor([0, 3, 8])
WRONG = {  # what worker 1 does first, and what it is told
    "clock": (lambda c: c.push(3, 1, 0.0, 0.1), "worker 1 pushes at clock 3, its clock is 0"),
    "id": (
        lambda c: push_rows(c, 0, torch.tensor([1, 50]), 4),
        "users: id 50 is out of range, it has rows 0 to 49",
    ),
    "large id": (lambda c: push_rows(c, 0, torch.tensor([2**40]), 4), f"table users: id {2**40} is out of range"),
    "negative id": (lambda c: push_rows(c, 0, torch.tensor([-2]), 4), "table users: id -2 is out of range"),
    "pulled id": (lambda c: c.pull_rows(0, torch.tensor([50]), 0).wait(), "table users: id 50 is out of range"),
    "NaN": (lambda c: push_rows(c, 0, ROW_IDS, 4, torch.nan), "table users: id 0 has a gradient with NaN or infinity"),
    "dense NaN": (lambda c: push_dense(c, torch.nan), "NaN or infinity in the dense gradients"),
    "items": (lambda c: c.push(0, float("nan"), 0.0, 0.1), "worker 1 clock 0: items nan"),
    "no items": (lambda c: c.push(0, -1.0, 0.0, 0.1), "worker 1 clock 0: items -1"),
    "rate": (lambda c: c.push(0, 1, 0.0, float("inf")), "worker 1 clock 0: lr inf"),
    "table": (lambda c: push_raw(c, Header(PUSH, 9, 0, 0, 0)), "there is no table number 9"),
    "length": (lambda c: push_raw(c, Header(PUSH, DENSE, 0, 0, 3)), "dense gradients of 3 elements"),
}


def push_rows(client, table, ids, width, value=1.0):
    client.push(0, 1, 0.0, 0.1, rows={table: (ids, torch.full((len(ids), width), value, dtype=torch.float64))})


def push_dense(client, value):
    client.push(0, 1, 0.0, 0.1, torch.full_like(gradient(0, 0), value))


def push_raw(client, header):
    """Past what a client would say."""
    for line in client.lines:
        client.tell(line, header)
        if header.count:
            line.post(PUSHED, np.zeros(8 * header.count, np.uint8))
        client.tell(line, Header(FINISH))


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("staleness", (0, 2))
def test_what_is_refused_is_named_and_changes_nothing(comm, wrong, staleness):
    """Who was refused can only leave, and all is as if it had left before."""
    if (part := on_ranks(comm, 2, 1)) is None:
        return
    call, line = WRONG[wrong]

    def work(client, worker, mistaken):
        if worker == 1:
            told = []
            if mistaken:
                for _ in range(2):
                    with pytest.raises(RankFailed) as caught:
                        call(client)
                        client.progress.wait(client.poll)
                    told.append(str(caught.value))
            client.done()
            return told
        rows = client.pull_rows(0, ROW_IDS, 0).wait().values
        client.push(0, 2, 0.0, 0.125, gradient(0, 0), rows={0: (ROW_IDS, rows * 0 + worker)})
        client.wait_sent()
        after = client.pull_rows(0, ROW_IDS, 1, bound=0).wait().values
        return pull_dense(client, 1, bound=0).tolist(), after.tolist()

    how = ServiceSettings(staleness=staleness)
    (dense, rows), told = serve(part, 1, partial(work, mistaken=True), how)[0]
    assert line in told[0] and told[0].startswith("server 0: ") and told[1] == told[0], told
    assert serve(part, 1, partial(work, mistaken=False), how)[0] == [[dense, rows], []]
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_a_push_that_does_not_fit_is_refused_before_anything_is_sent(comm):
    if (part := on_ranks(comm, 1, 1)) is None:
        return
    double = {"dtype": torch.float64}
    wrong = [
        ({0: (ROW_IDS, torch.zeros(3, 5, **double))}, None, r"table users: gradients \(3, 5\)"),
        ({0: (ROW_IDS, torch.zeros(3, 4))}, None, r"table users: gradients \(3, 4\) torch.float32"),
        ({0: (ROW_IDS.int(), torch.zeros(3, 4, **double))}, None, r"for ids \(3,\) torch.int32"),
        ({7: (ROW_IDS, torch.zeros(3, 4, **double))}, None, "no table number 7"),
        ({}, torch.zeros(3, **double), r"dense gradients \(3,\)"),
        ({}, gradient(0, 0).float(), "torch.float32, not "),
    ]

    def work(client, worker):
        for rows, dense, line in wrong:
            with pytest.raises(ValueError, match=line):
                client.push(0, 1, 0.0, 0.1, dense, rows=rows)

    assert serve(part, 1, work)[1][0]["requests"] == 1  # that it leaves
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("num_servers", (1, 2))
def test_payloads_travel_in_pieces(comm, num_servers, monkeypatch):
    """Ids, rows, dense values and what is asked for, each longer than a piece; NaN in the last of them is found."""
    monkeypatch.setattr(outbox, "PIECE_BYTES", 104)
    if comm.size <= num_servers or (part := on_ranks(comm, 1, num_servers)) is None:
        return
    ids = torch.arange(49)
    sums = torch.arange(4.0 * 49, dtype=torch.float64).view(49, 4)

    def work(client, worker):
        before, dense = client.pull_rows(0, ids, 0).wait().values, pull_dense(client, 0)
        client.push(0, 1, 0.0, 0.125, gradient(0, 0), rows={0: (ids, sums)})
        client.wait_sent()
        after = client.pull_rows(0, ids, 1).wait().values
        torch.testing.assert_close(after, before - 0.125 * sums, rtol=0, atol=1e-14)
        expected = dense - 0.125 * gradient(0, 0)
        torch.testing.assert_close(pull_dense(client, 1)[padding()], expected[padding()], rtol=0, atol=1e-14)
        sums[48, 3] = torch.nan
        client.push(1, 1, 0.0, 0.125, rows={0: (ids, sums)})
        with pytest.raises(RankFailed, match="id 48 has a gradient with NaN"):
            client.progress.wait(client.poll)

    serve(part, num_servers, work)
    part.Free()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("staleness", (0, 2, inf))
def test_nobody_waits_for_a_worker_that_has_finished_or_had_nothing_to_do(comm, staleness):
    rounds = [0, 3, *[20] * 5]
    if (part := on_ranks(comm, min(comm.size - 1, 7), 1)) is None:
        return

    def work(client, worker):
        for clock in range(rounds[worker]):
            pull_dense(client, clock)
            client.push(clock, 1, 0.0, 0.01, gradient(worker, clock))
            client.wait_sent()

    _, figures, _ = serve(part, 1, work, ServiceSettings(staleness=staleness))
    most = max(rounds[: part.size - 1])
    pushed = sum(rounds[: part.size - 1])
    assert figures[0]["updates"] == (most if staleness == 0 else pushed)
    assert max(map(int, figures[0]["clock_gaps"])) <= staleness
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_a_pull_never_holds_parts_of_two_updates(comm):
    """Each update keeps the sum of all values; much more than a message that is sent at once."""
    if (part := on_ranks(comm, min(comm.size - 1, 3), 1)) is None:
        return
    large = [Segment("large", 0, 100_000)]

    def work(client, worker):
        sums = set()
        for clock in range(30):
            into = torch.zeros(100_000, dtype=torch.float64)
            values = client.pull(clock, into).wait().values
            sums.add(float(values.sum()))
            change = torch.zeros_like(into)
            change[worker], change[-1 - worker] = 8.0, -8.0
            client.push(clock, 1, 0.0, 0.125, change)
            client.wait_sent()
        return sorted(sums)

    results, _, _ = serve(part, 1, work, ServiceSettings(staleness=inf), segments=large)
    assert all(sums == [0.0] for sums in results)
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_workers_that_push_without_end_are_held_back(comm):
    """The server comes to notices one by one; a worker may have sixteen that it has not come to."""
    if (part := on_ranks(comm, min(comm.size - 1, 5), 1)) is None:
        return

    def work(client, worker):
        most = 0
        for clock in range(200):
            client.push(clock, 1, 0.0, 0.001, gradient(worker, clock).clone())
            most = max(most, max(len(unread) for unread in client.outbox._unread.values()))
        return most

    results, figures, _ = serve(part, 1, work, ServiceSettings(staleness=inf))
    assert all(0 < most <= MOST_UNREAD for most in results)
    assert figures[0]["updates"] == 200 * len(results)
    part.Free()
