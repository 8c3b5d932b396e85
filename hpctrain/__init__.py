"""hpctrain: distributed training of PyTorch models where MPI is the transport.

`import hpctrain` loads neither MPI nor torch.
"""

__version__ = "0.1.0"
