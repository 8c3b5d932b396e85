"""The plain torch loop that one process equals bit for bit. Imports nothing of hpctrain."""

import torch
from torch import nn


def plain_loop(layers, loss, batches, make_optimizer):
    """Trains `layers` in one process on `batches` of (inputs, targets); returns the losses, means over the items."""
    model = nn.Sequential(*layers) if len(layers) > 1 else layers[0]
    optimizer = make_optimizer(model.parameters())
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        total, items = loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
        total.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / items)
        optimizer.step()
        losses.append(float(total.detach()) / items)
    return losses


def make_optimizer(name, lr, momentum, weight_decay):
    """torch's optimizer as a user would write it."""
    choices = {
        "sgd": lambda p: torch.optim.SGD(p, lr=lr, weight_decay=weight_decay),
        "momentum": lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum, weight_decay=weight_decay),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=lr, weight_decay=weight_decay),
        "adam": lambda p: torch.optim.Adam(p, lr=lr, weight_decay=weight_decay),
        "adamw": lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=weight_decay),
    }
    return choices[name]
