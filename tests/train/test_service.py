"""Workers and servers without a model: what pulls see, what is refused, and that the job ends."""

import pytest
import torch

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
