"""The optimizers by name: torch's own, so that a run equals a plain torch loop."""

import torch


def build_optimizer(name: str, parameters, lr: float, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    """`momentum` belongs to the optimizer of that name. A parameter whose grad is None is left alone."""
    parameters = list(parameters)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    kinds = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return kinds[name](parameters, lr=lr, weight_decay=weight_decay)


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """What it holds beside the weights so far: moments, sums, counts of steps."""
    states = optimizer.state.values() if optimizer is not None else ()
    return sum(each.nbytes for state in states for each in state.values() if isinstance(each, torch.Tensor))
