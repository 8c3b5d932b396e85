"""What tasks of the user's own return: weights of any kind are right, mistakes are one line that names the member."""

import pytest
import torch
from torch import nn

from hpctrain.comm.abort import RankFailed
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.tasks.protocol import metric_of
from hpctrain.train.batches import Batches, GlobalSampler
from hpctrain.train.build import build_evaluation, build_model
from hpctrain.train.checked import checked_baseline, checked_loss, checked_metric
from hpctrain.train.errors import AgreedError
from hpctrain.train.loader import Reader, Request, read
from hpctrain.train.run import same_rows
from tests.train.toys import Masked, run

ONE = torch.tensor(1.5)


def refusal(call, *args, kind=RankFailed) -> str:
    with pytest.raises(kind) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "result, words",
    [
        (ONE, "loss() gave a tensor of shape []; it should give (the sum over"),
        ((ONE, 2, 3), "loss() gave 3 values;"),
        ((torch.ones(2), 2), "loss() gave a tensor of shape [2] as the sum;"),
        ((1.5, 2), "loss() gave 1.5 as the sum;"),
        ((ONE, None), "loss() gave None as the number of items;"),
        ((ONE, -2), "loss() gave -2 as the number of items;"),
        ((ONE, float("nan")), "loss() gave nan as the number of items;"),
        ((ONE, torch.ones(3)), "loss() gave a tensor of shape [3] as the number of items;"),
    ],
)
def test_a_loss_of_another_form_is_named(result, words):
    assert words in refusal(checked_loss, result)


@pytest.mark.parametrize("items", [3, 0, 2.5, torch.tensor(3), torch.tensor([2.0])])
def test_sums_and_weights_of_any_kind_are_taken(items):
    loss, count = checked_loss((torch.tensor([[1.5]]), items))
    assert loss.shape == () and count == float(items)


@pytest.mark.parametrize(
    "result, words",
    [
        (1.5, "metric() gave 1.5; it should give {name:"),
        ({"loss": 1.5}, "metric() gave 1.5 as loss;"),
        ({"loss": (torch.ones(2), 1)}, "metric() gave a tensor of shape [2] as loss;"),
        ({"loss": (1.0, "many")}, "metric() gave a str as the count of loss;"),
    ],
)
def test_a_metric_of_another_form_is_named(result, words):
    assert words in refusal(checked_metric, result)


def test_a_baseline_of_another_form_is_told_and_ends_nothing():
    assert checked_baseline({"loss": torch.tensor(2.0)}) == {"loss": 2.0}
    assert "baseline() gave 2.0; it should give" in refusal(checked_baseline, 2.0, kind=ValueError)


@pytest.mark.parametrize("weight", (1.0, 0.25))
def test_items_may_weigh_fractions(weight):
    """Sum and count weighed alike change neither training nor evaluation."""

    class Weighed(Masked):
        def loss(self, outputs, targets):
            total, items = super().loss(outputs, targets)
            return weight * total, weight * items

        metric = property()

    task = Weighed()
    losses, weights, executor = run(task, global_batch_size=7)
    expected, theirs, _ = run(Masked(), global_batch_size=7)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert all(torch.allclose(weights[name], theirs[name], rtol=0, atol=1e-12) for name in theirs)
    with Mesh(None) as mesh:
        how = Config(precision="float64", global_batch_size=5)
        found = build_evaluation(how, task, mesh).run(executor.stage)
        wanted = build_evaluation(how, Masked(), mesh).run(executor.stage)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-12) and metric_of(task)


@pytest.mark.parametrize(
    "row, words",
    [
        (torch.ones(4), "row 1 of dataset() is a Tensor; a row is (input, target)"),
        ({"x": ONE, "y": ONE}, "row 1 of dataset() is a dict;"),
        ((ONE, ONE, ONE), "row 1 of dataset() is 3 values;"),
    ],
)
def test_a_row_that_is_no_pair_is_named(row, words):
    """Two such rows would be collated to something that looks like a pair."""
    assert words in refusal(lambda: list(read(Reader(lambda: [row] * 3, torch.float32), [Request((1, 2))])))


def test_a_data_set_that_ends_early_is_an_error_and_no_end():
    class Ends:
        def __getitem__(self, row):
            return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(read(Reader(Ends, torch.float32), [Request((0,)), Request((1,))]))


@pytest.mark.parametrize(
    "layers, words",
    [
        (None, "layers() gave None; it should give a list of functions that each build one layer"),
        ([], "layers() gave 0 values;"),
        ([nn.Linear(2, 2)], "layers() gave a Linear;"),
        (nn.Sequential(nn.Linear(2, 2)), "layers() gave a Sequential;"),
        ([lambda: 3], "layers.0 is 3; it should be a torch.nn.Module"),
        ([lambda: nn.LazyLinear(3)], "layers.0.weight has no shape yet; give the layer its sizes"),
    ],
)
def test_layers_of_another_form_are_named(layers, words):
    task = Masked()
    task.layers = lambda: layers
    assert words in refusal(build_model, Config(), task, kind=AgreedError)


class Turning(nn.Module):
    """Rotary positions keep a complex table like this."""

    def __init__(self, register):
        super().__init__()
        register(self, "turn", nn.Parameter(torch.randn(6, dtype=torch.complex64)))

    def forward(self, x):
        return (x * self.turn).abs()


def buffer(module, name, parameter):
    module.register_buffer(name, parameter.detach())


def test_complex_buffers_stay_complex_and_complex_parameters_are_refused():
    task = Masked()
    task.layers = lambda: [lambda: Turning(nn.Module.register_parameter)]
    assert "layers.0.turn is complex; train torch.view_as_real of it" in refusal(
        build_model, Config(), task, kind=AgreedError
    )
    task.layers = lambda: [lambda: Turning(buffer)]
    turn = build_model(Config(precision="float64"), task).layers[0].turn
    assert turn.dtype == torch.complex64 and turn.imag.any()


def test_a_loss_that_depends_on_no_parameter_is_an_error():
    class Detached(Masked):
        def loss(self, outputs, targets):
            return super().loss(outputs.detach(), targets)

    assert refusal(run, Detached(), kind=AgreedError) == "step 1: the loss depends on no parameter; is it detached?"


@pytest.mark.mpi(min_size=2)
def test_ranks_whose_rows_differ_are_told_so(comm):
    """As where a data set is drawn from a generator without a seed."""
    rows = [(torch.full((2,), float(comm.rank == 1 and row == 4)), torch.tensor(row)) for row in range(9)]
    with Mesh(comm) as mesh:
        batches = Batches(Reader(lambda: rows, torch.float32), GlobalSampler(9, 3, 0), mesh.replica, mesh.data.size, 1)
        assert "rank 1 reads different data: 'row 4 has sha256" in refusal(same_rows, batches, mesh, kind=AgreedError)
