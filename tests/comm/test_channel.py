"""What goes into a channel comes out on the other side: any shapes and dtypes, as many as one likes, in order.

On two ranks, and on three, of which one looks on: torch takes long to start on each.
"""

import numpy as np
import pytest

from hpctrain.comm.channel import Receiver, Sender
from hpctrain.comm.progress import Progress

pytestmark = pytest.mark.mpi(min_size=2)
SIZES = (2, 3)
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool"]


@pytest.fixture
def torch(peers):
    if peers.size not in SIZES:
        pytest.skip(f"{SIZES} ranks run this")
    return pytest.importorskip("torch")


@pytest.fixture
def link(torch, fresh_comm):
    """A channel from rank 0 to rank 1: the end of this rank; other ranks look on."""
    comm, progress = fresh_comm(), Progress()
    if comm.rank == 0:
        yield Sender(comm, 1, 0, progress)
    else:
        yield Receiver(comm, 0, 0, progress) if comm.rank == 1 else None


def numbers(shape, dtype="float32", seed=0):
    import torch

    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.integers(0, 2 if dtype == "bool" else 100, shape)).to(getattr(torch, dtype))


def pass_on(link, messages):
    """Sends all messages before any is taken; the receiver compares."""
    import torch

    if isinstance(link, Sender):
        for tensors, note in messages:
            link.put(tensors, note)
        link.close()
    elif isinstance(link, Receiver):
        link.expect(len(messages))
        for tensors, note in messages:
            found, told = link.take()
            assert told == note and len(found) == len(tensors)
            for each, expected in zip(found, tensors):
                assert each.dtype == expected.dtype and each.shape == expected.shape and torch.equal(each, expected)
                assert each.data_ptr() % 64 == 0 or not each.numel(), "aligned"
            link.release(found)
        link.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_and_shape(link, dtype):
    shapes = [(3, 4), (3, 4), (1,), (), (0, 5), (2, 3, 4), (3, 4)]
    pass_on(link, [([numbers(shape, dtype, seed)], None) for seed, shape in enumerate(shapes)])


def test_several_tensors_with_a_note_and_none_at_all(link):
    pass_on(
        link,
        [
            ([numbers(5), numbers((2, 2), "int64")], {"keys": ["a", "b"], "grad": [True, False]}),
            ([], ["nothing", None, 1.5]),
            ([numbers(5), numbers((2, 2), "int64")], {"keys": ["a", "b"], "grad": [True, False]}),
            ([numbers(5)], None),
        ],
    )


@pytest.mark.parametrize("nbytes", (4, 1 << 12, 1 << 17, 1 << 24))
def test_sends_do_not_block_whatever_the_size(link, nbytes):
    """All are sent before the first is taken, beyond what any MPI library keeps for the receiver."""
    pass_on(link, [([numbers(nbytes // 4, seed=seed)], seed % 2) for seed in range(8)])


def test_more_descriptions_than_there_are_tags(link):
    pass_on(link, [([numbers(1 + number)], number) for number in range(150)])


def test_only_the_payload_counts_and_what_does_not_change_is_described_once(link):
    pass_on(link, [([numbers((3, 5))], None)] * 10)
    if isinstance(link, Sender):
        assert (link.bytes_sent, link.messages_sent, link.control_messages) == (10 * 60, 10, 11)


def test_memory_is_used_again_once_it_is_released(link):
    if isinstance(link, Sender):
        for _ in range(6):
            link.put([numbers(1000)])
        link.close()
    elif isinstance(link, Receiver):
        link.expect(6)
        places = set()
        for _ in range(6):
            tensors, _ = link.take()
            places.add(tensors[0].data_ptr())
            link.release(tensors)
        link.close()
        assert len(places) <= 2, "one being read, one that the next message arrives in"


def test_both_directions_at_once(torch, fresh_comm):
    """Two lanes between the same two ranks, each sending first."""
    comm, progress = fresh_comm(), Progress()
    if comm.rank > 1:
        return
    peer, lanes = 1 - comm.rank, ((0, 1), (1, 0))[comm.rank]
    sender, receiver = Sender(comm, peer, lanes[0], progress), Receiver(comm, peer, lanes[1], progress)
    receiver.expect(5)
    for number in range(5):
        sender.put([numbers(1 << 20, seed=number + comm.rank)])
        tensors, _ = receiver.take()
        assert torch.equal(tensors[0], numbers(1 << 20, seed=number + peer))
        receiver.release(tensors)
    sender.close()
    receiver.close()


def test_what_is_posted_and_does_not_come_is_taken_back(link, torch):
    if isinstance(link, Sender):
        link.put([numbers(9)])
        link.close()
    elif isinstance(link, Receiver):
        link.expect(3)
        assert torch.equal(link.take()[0][0], numbers(9))
        link.close()
