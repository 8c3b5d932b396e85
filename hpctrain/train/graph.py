"""What torch's graph says about a backward under way: whether it adds to gradients, or only computes some.

A hook on a tensor runs in both, in backward() and in torch.autograd.grad. The engine knows which nodes it will run.
"""

from collections import deque
from collections.abc import Set

import torch
from torch import nn


def accumulator(parameter: nn.Parameter):
    """The node that adds to `parameter.grad`. It lives only as long as somebody holds it."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def will_add(node) -> bool:
    """Inside a hook: whether this backward reaches the leaf `node` and adds to its gradient."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad with respect to this very leaf
        return False


def leaf_below(tensor: torch.Tensor, wanted: Set):
    """The node of a leaf that `tensor` depends on: one of those wanted where there is one; None without any.

    A plain backward through the tensor reaches it; one that computes only some gradients may leave it out.
    """
    seen, found = {tensor.grad_fn}, None
    waiting = deque(seen)
    while waiting:
        node = waiting.popleft()
        if node in wanted:
            return node
        below = [each for each, _ in node.next_functions if each is not None and each not in seen]
        if not node.next_functions:
            found = node
        seen.update(below)
        waiting.extend(below)
    return found
