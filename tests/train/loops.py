"""Models, rows and plain loops for the tests of training loops of one's own."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

WIDTH = 5


class Net(nn.Module):
    """`sometimes` is used where the first number of the batch is positive, `never` by nobody; the last one is tied."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, WIDTH)
        self.tied = nn.Linear(WIDTH, 7)
        self.tied.weight = self.first.weight

    def forward(self, x):
        use = x[0, 0] > 0
        x = torch.tanh(self.first(x))
        if use:
            x = self.sometimes(x)
        return self.last(self.norm(x) + self.tied(self.last(x)))


def net(seed=0, dtype=torch.float64, build=Net):
    torch.manual_seed(seed)
    return build().to(dtype)


def rows(step: int, count: int, dtype=torch.float64) -> torch.Tensor:
    """The rows of all ranks in one step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def share(step: int, mesh, each: int = 4, dtype=torch.float64) -> torch.Tensor:
    """This rank's rows of one step."""
    return rows(step, each * mesh.size, dtype)[mesh.rank :: mesh.size]


def loss_of(model, batch) -> torch.Tensor:
    return mse_loss(model(batch), batch.flip(-1))


def mean_loss(model, step, mesh, each=4):
    """The mean over the ranks of what each rank's loss is, in one process."""
    batches = [rows(step, each * mesh.size)[rank :: mesh.size] for rank in range(mesh.size)]
    return sum(loss_of(model, batch) for batch in batches) / mesh.size


def assert_close(model, reference, tolerance=1e-10) -> None:
    found, expected = dict(model.named_parameters()), dict(reference.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert (found[name] - parameter).abs().max() <= tolerance, name


def assert_same_everywhere(mesh, tensors) -> None:
    """The same bits on all ranks."""
    for index, tensor in enumerate(tensors):
        first = tensor.detach().clone()
        mesh.data.broadcast(first)
        assert torch.equal(first, tensor.detach()), index


def assert_learns_in_a_join(mesh, model, num_updates: int, accumulates: bool = False) -> None:
    """SGD on 8 rows of float32 for so many updates, of two backwards each where it `accumulates`. Collective."""
    optimizer, batch, losses = torch.optim.SGD(model.parameters(), lr=0.1), rows(0, 8, torch.float32), []
    with model.join(optimizer):
        for _ in range(num_updates):
            optimizer.zero_grad()
            if accumulates:
                with model.no_sync():
                    loss_of(model, batch).backward()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert_same_everywhere(mesh, model.parameters())
