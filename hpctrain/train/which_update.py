"""Which update a layout has: by the ring of replicas, by a stage on its own, or through servers."""

from collections.abc import Callable
from functools import partial

import torch

from hpctrain.comm.device_buffer import allocator
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.roles import Roles
from hpctrain.config import Config
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.optimizer_shard import OptimizerShard
from hpctrain.model.random_state import CPU
from hpctrain.plan.schedule import SCHEDULES
from hpctrain.plan.sharding import Segment
from hpctrain.train.client import ServiceClient
from hpctrain.train.errors import AgreedError
from hpctrain.train.layout import place_of
from hpctrain.train.local_update import LocalUpdate
from hpctrain.train.lookups import LocalRows, Lookups, ServedRows, Source
from hpctrain.train.ring_and_servers import RingAndServers
from hpctrain.train.served_update import ServedUpdate
from hpctrain.train.service import describe
from hpctrain.train.sharded_update import ShardedUpdate
from hpctrain.train.tables import Tables, local_tables, service_settings, table_dtype, table_shapes
from hpctrain.train.update import Update


def build_update(
    config: Config,
    mesh: Mesh,
    gradients: FlatGradients,
    roles: Roles | None,
    tables: Tables,
    shard: OptimizerShard | None = None,
    device: torch.device = CPU,
) -> Callable[..., Update]:
    """What makes the update, from what all kinds of it need. Collective where there are servers."""
    lookups_of = partial(_lookups, config, tables, device=device)
    if shard is not None:
        return partial(ShardedUpdate, shard=shard, lookups=lookups_of(local_rows(config, tables)))
    if roles is None:
        if not SCHEDULES[config.schedule].flushes:
            place = place_of(config, mesh.stage)
            return partial(LocalUpdate, name=config.schedule, place=place, vertical_sync=config.vertical_sync)
        return partial(Update, lookups=lookups_of(local_rows(config, tables)))
    through_ring = config.dense_via == "ring"
    flat = torch.empty(0) if through_ring else flatten(gradients)
    client = _client(config, roles, gradients, flat, tables)
    local = config.update == "worker"
    lookups = lookups_of(local_rows(config, tables) if local else ServedRows(client))
    if through_ring:
        return partial(RingAndServers, client=client, lookups=lookups)
    how = {"delay": config.delay, "window": config.delay_window}
    return partial(ServedUpdate, client=client, flat=flat, lookups=lookups, **how)


def local_rows(config: Config, tables: Tables) -> LocalRows:
    return LocalRows(local_tables(config, tables.tables, tables.modules))


def build_shard(config: Config, mesh: Mesh, gradients: FlatGradients) -> OptimizerShard | None:
    """What this replica's optimizer steps; None where that is everything."""
    if not config.shard_optimizer or mesh.data.size == 1:
        return None
    return OptimizerShard(gradients, flatten(gradients, "--shard-optimizer"), mesh.data.rank, mesh.data.size)


def flatten(gradients: FlatGradients, flag: str = "--servers") -> torch.Tensor:
    """One memory for all parameters, laid out as their gradients; the parameters lie in it from now on.

    AgreedError, with the `flag` that wants it, where they have several dtypes.
    """
    try:
        like = gradients.flat
    except ValueError as error:
        raise AgreedError(f"{flag}: {error}") from None
    flat = torch.as_tensor(allocator(like.device)(like.nbytes)).view(like.dtype).zero_()
    for name, place in gradients.places.items():
        parameter = gradients.parameters[name]
        with torch.no_grad():
            flat[place].copy_(parameter.reshape(-1))
        parameter.data = flat[place].view(parameter.shape)
    return flat


def _lookups(config: Config, tables: Tables, source: Source, device: torch.device) -> Lookups | None:
    if not tables.modules:
        return None
    return Lookups(tables.modules, tables.tables, source, tables.batches, table_dtype(config), device)


def _client(
    config: Config, roles: Roles, gradients: FlatGradients, flat: torch.Tensor, tables: Tables
) -> ServiceClient:
    dtype = flat.dtype if len(flat) else table_dtype(config)
    places = gradients.places if len(flat) else {}
    segments = [Segment(name, place.start, place.stop) for name, place in places.items()]
    shapes = table_shapes(tables.tables, tables.modules)
    described = describe(service_settings(config), dtype, segments, len(flat), shapes, roles.num_servers)
    return ServiceClient(roles, described, flat.cpu())
