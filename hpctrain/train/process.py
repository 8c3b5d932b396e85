"""What holds for a whole process that trains or serves."""

import gc

import torch


def settle(num_threads: int) -> None:
    """Threads of torch; and what has been imported is no longer looked at by each full garbage collection.

    With torch's modules such a collection takes 0.1 s, and wherever one rank pauses, others wait.
    """
    torch.set_num_threads(num_threads)
    gc.freeze()
