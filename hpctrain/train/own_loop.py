"""Servers in a training loop of the user's own: what a worker pulls and pushes, by the names of its model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.comm.device_buffer import allocator
from hpctrain.comm.roles import Roles
from hpctrain.config import Config, UsageError
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.row_values import add_up
from hpctrain.plan.sharding import Segment
from hpctrain.train.client import ServiceClient
from hpctrain.train.host_copy import HostCopy
from hpctrain.train.lookups import oldest
from hpctrain.train.service import TableShape, describe
from hpctrain.train.start import share_first
from hpctrain.train.tables import service_settings
from hpctrain.train.which_update import flatten
from hpctrain.train.wrap import the_device

SETTINGS = ("staleness", "aggregate", "optimizer", "table_optimizer", "lr", "momentum", "weight_decay", "adapt_lr")
SETTINGS += ("max_table_rows", "seed")


class ParameterClient:
    """A worker's parameters, which servers hold and step. Collective with the other workers and all servers.

        roles = Roles(servers=1)  # the last rank
        if roles.is_server:
            ParameterServer(roles).serve()
        else:
            client = ParameterClient(roles, model, lr=0.1, staleness=2)
            for inputs, targets in batches:
                client.pull()
                loss = sum_of_losses(model(inputs), targets)
                loss.backward()
                client.push(items=len(targets), loss=float(loss))
            client.done()

    `model`: a module, or parameters by name, on the host or on one CUDA device; worker 0's first values are
    everybody's. `tables`: {name: (number of rows,
    width, deviation of first values)}; `rows(name, ids)` looks them up. The settings are those of the command line:
    staleness (float("inf"): none), aggregate, optimizer, table_optimizer, lr, momentum, weight_decay, adapt_lr,
    max_table_rows, seed.
    Raises ValueError for a value that cannot be, RankFailed where a server refuses a request.
    """

    def __init__(
        self,
        roles: Roles,
        model: nn.Module | Mapping[str, nn.Parameter] | None = None,
        tables: Mapping[str, tuple[int, int, float]] | None = None,
        **settings: Any,
    ):
        unknown = settings.keys() - set(SETTINGS)
        if unknown:
            raise TypeError(f"ParameterClient: no setting is called {unknown.pop()}; there is {', '.join(SETTINGS)}")
        try:
            self._config = Config(servers=roles.num_servers, **settings)
        except UsageError as error:
            raise ValueError(f"ParameterClient: {str(error).removeprefix('--')}") from None
        named = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model or {})
        device = the_device(named, "ParameterClient")
        self._gradients = FlatGradients(named, allocator(device), 1 << 62)
        self._flat = flatten(self._gradients)
        self._weights, self._pushed = HostCopy(self._flat), HostCopy(self._gradients.flat)
        self._segments = [Segment(name, each.start, each.stop) for name, each in self._gradients.places.items()]
        shapes = [TableShape(name, *shape) for name, shape in (tables or {}).items()]
        dtype = self._flat.dtype if len(self._flat) else torch.get_default_dtype()
        described = describe(
            service_settings(self._config), dtype, self._segments, len(self._flat), shapes, roles.num_servers
        )
        self._client = ServiceClient(roles, described, self._weights.fetch())
        if isinstance(model, nn.Module):
            fixed = {name: each for name, each in model.named_parameters() if not each.requires_grad}
            share_first({**fixed, **dict(model.named_buffers())}, roles.group)
        self._tables = {shape.name: number for number, shape in enumerate(shapes)}
        self._looked_up: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in self._tables}
        self.clock = 0  # iterations that this worker has pushed
        self._read: dict[int, int] = {}  # by server, the oldest version that the next push is computed with

    def pull(self, fresh: bool = False) -> None:
        """Brings the parameters up to date, as far as `staleness` asks for; `fresh`: waits for all other workers."""
        pull = self._client.pull(self.clock, self._weights.host, bound=0 if fresh else None)
        self._read = pull.wait().versions
        self._weights.store()

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table: integer ids of any shape -> (*ids.shape, width); `push` sends their gradients."""
        if table not in self._tables:
            raise ValueError(f"rows({table!r}): there is no such table; there is {', '.join(self._tables) or 'none'}")
        ids = torch.as_tensor(ids)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"rows({table!r}): ids are {ids.dtype}; integers would do")
        ids = ids.long()
        distinct, places = ids.reshape(-1).unique(return_inverse=True)
        number = self._tables[table]
        pull = self._client.pull_rows(number, distinct.cpu(), self.clock, create=torch.is_grad_enabled()).wait()
        rows = pull.values.to(ids.device)
        if torch.is_grad_enabled():
            self._read = oldest(self._read, pull.versions)
            self._looked_up[table].append((distinct, rows.requires_grad_()))
        return rows[places].view(*ids.shape, rows.shape[1])

    def push(self, items: float, loss: float = 0.0, lr: float | None = None) -> None:
        """Sends the gradients of what was backwarded since the last push: sums over `items`, as is `loss`.

        `lr` in place of the settings'. Returns when they have left, and all gradients are zero.
        """
        self._gradients.flush()
        rows = {}
        for name, looked_up in self._looked_up.items():
            pushed = [(ids.cpu(), rows.grad.cpu()) for ids, rows in looked_up if rows.grad is not None]
            if pushed:
                rows[self._tables[name]] = add_up(pushed)
            looked_up.clear()
        touched = [self._gradients.touched[segment.name] for segment in self._of_parts()]
        dense = self._pushed.fetch() if len(self._flat) else None
        rate = self._config.lr if lr is None else lr
        self._client.push(self.clock, items, loss, rate, dense, touched, rows, self._read)
        self.clock += 1
        self._client.wait_sent()
        self._gradients.zero()

    def done(self) -> None:
        """This worker leaves: no other waits for it any more. The servers end after the last one."""
        self._client.done()
        self._gradients.close()

    def _of_parts(self) -> list[Segment]:
        return [segment for part in self._client.description.parts for segment in part.segments]
