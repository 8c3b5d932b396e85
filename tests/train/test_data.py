"""Rows: the same in every layout, each once an epoch, each once in an evaluation."""

import numpy as np
import pytest
import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.model.stage import Stage
from hpctrain.train.batches import Batches, GlobalSampler
from hpctrain.train.evaluation import Evaluation
from hpctrain.train.loader import Reader


def test_every_row_comes_once_an_epoch_in_an_order_of_its_own():
    sampler = GlobalSampler(37, 10, seed=3)
    epochs = [np.concatenate([sampler.rows(4 * epoch + step) for step in range(4)]) for epoch in range(3)]
    for rows in epochs:
        assert sorted(rows) == list(range(37))
    assert not np.array_equal(epochs[0], epochs[1])
    assert len(sampler.rows(3)) == 7, "the last batch is what is left"
    assert np.array_equal(sampler.rows(0), epochs[0][:10]), "any order of asking"
    assert not np.array_equal(GlobalSampler(37, 10, seed=4).rows(0), sampler.rows(0))


@pytest.mark.parametrize("replicas, microbatches", [(1, 1), (3, 1), (1, 4), (3, 2), (8, 3)])
def test_the_pieces_of_all_replicas_are_the_global_batch_in_order(replicas, microbatches):
    data = [(torch.tensor([float(row)]), torch.tensor(row)) for row in range(37)]
    sampler = GlobalSampler(37, 10, seed=0)
    for step in range(8):
        rows, numbers = [], []
        for replica in range(replicas):
            batches = Batches(Reader(lambda: data, torch.float64), sampler, replica, replicas, microbatches)
            for index in range(microbatches):
                piece = batches.microbatch(step, index)
                if piece is not None:
                    assert piece.inputs.dtype == torch.float64 and piece.targets.dtype == torch.int64
                    rows += piece.targets.tolist()
                    numbers.append(piece.number)
        assert rows == sampler.rows(step).tolist()
        assert numbers == sorted(set(numbers))


@pytest.mark.mpi
@pytest.mark.parametrize("num_rows", (1, 3, 17))
def test_evaluation_counts_every_row_once(comm, num_rows):
    data = [(torch.tensor([float(2**row)]), torch.tensor(1)) for row in range(num_rows)]

    def metric(outputs, targets):
        return {"sum": (float(outputs.sum()), 1), "mean": (float(outputs.sum()), len(targets))}

    with Mesh(comm) as mesh:
        evaluation = Evaluation(Reader(lambda: data, torch.float64), num_rows, metric, mesh, 2)
        found = evaluation.run(Stage([torch.nn.Identity()]))
    assert found["mean"] == (2**num_rows - 1) / num_rows
