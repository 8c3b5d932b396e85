"""Asynchronous pipelines in one process: the whole history of the weights is kept, and each gradient is computed with
the versions that the papers name. Imports nothing of hpctrain.

1f1b-async (PipeDream): w(t+1) = w(t) - lr * grad f(w_0(t-p+1), ..., w_(p-1)(t)), versions before 0 are 0; with vertical
sync all stages use w(t-p+1). 2bw: W(t+1) = W(t) - lr * grad f(W(t-1)), W(-1) = W(0).
"""

import torch
from torch.func import functional_call


def version(schedule, num_stages, stage, update, vertical_sync):
    if schedule == "2bw":
        return max(0, update - 1)
    return max(0, update - (num_stages - 1 if vertical_sync else num_stages - 1 - stage))


def train(layers, cuts, updates, loss, optimizer, *, schedule, vertical_sync=False, clip_norm=None):
    """Trains `layers` (modules, changed in place), of which stage s has layers[cuts[s]:cuts[s + 1]]; returns losses.

    `updates`: for each the micro-batches (inputs, targets) of all replicas; None is where the pipeline is drained.
    `loss` gives (sum, items); `optimizer(parameters)` steps a stage.
    """
    stages = [layers[start:stop] for start, stop in zip(cuts, cuts[1:])]
    modules = [torch.nn.Sequential(*stage) for stage in stages]
    optimizers = [optimizer(module.parameters()) for module in modules]
    histories, losses = [[copy(module)] for module in modules], []
    for microbatches in updates:
        if microbatches is None:
            histories = [[copy(module)] for module in modules]
            continue
        update = len(histories[0]) - 1
        used = [
            {
                name: w.clone().requires_grad_()
                for name, w in history[version(schedule, len(stages), s, update, vertical_sync)].items()
            }
            for s, history in enumerate(histories)
        ]
        total = items = 0.0
        for inputs, targets in microbatches:
            for module, weights in zip(modules, used):
                inputs = functional_call(module, weights, (inputs,))
            value, count = loss(inputs, targets)
            value.backward()
            total, items = total + float(value.detach()), items + count
        step(modules, used, optimizers, items, clip_norm, schedule)
        for history, module in zip(histories, modules):
            history.append(copy(module))
        losses.append((total, items))
    return losses


def step(modules, used, optimizers, items, clip_norm, schedule):
    if not items:
        return
    for module, weights in zip(modules, used):
        for name, parameter in module.named_parameters():
            parameter.grad = weights[name].grad * (1.0 / items)
    if clip_norm is not None:
        together = [[p for module in modules for p in module.parameters()]]
        alone = [list(module.parameters()) for module in modules]
        for parameters in together if schedule == "2bw" else alone:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    for each in optimizers:
        each.step()


def copy(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
