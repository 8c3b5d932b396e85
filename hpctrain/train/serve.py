"""A rank that serves, from the beginning of a run to its end, and how workers and servers part."""

from contextlib import ExitStack
from pathlib import Path

from hpctrain.comm.roles import Roles
from hpctrain.config import Config
from hpctrain.train import facts
from hpctrain.train.process import settle
from hpctrain.train.server import ParameterServer
from hpctrain.train.signals import StopSignals
from hpctrain.train.stall import watching_server
from hpctrain.train.survival import Survival


def serve(config: Config, folder: Path, roles: Roles, signals: StopSignals, survival: Survival | None = None) -> int:
    """Serves until the workers are done; returns the exit code that rank 0 says. Collective with `part`."""
    settle(config.threads)
    with ExitStack() as files:
        record = files.enter_context(open_log(folder, roles.server)) if config.record_log else None
        server = ParameterServer(roles, record, signals.was_asked, survival.shard if survival else None)
        if survival is not None:
            survival.shard, survival.writing = server.shard, server.writing
        with watching_server(config, folder, roles, server.shard):
            figures = server.serve()
    sent = [server.outbox.bytes_sent, server.outbox.messages_sent, server.outbox.control_messages]
    roles.everybody.all_gather_json({"server": figures, "sent": sent, "memory": facts.peak_memory_bytes()})
    return roles.everybody.broadcast_json(None)


def open_log(folder: Path, server: int):
    """Behind what there is, of a run that goes on."""
    return (folder / f"server-{server}.jsonl").open("a", encoding="utf-8")


def part(roles: Roles) -> list[dict]:
    """The workers need the servers no more; returns figures of each server. Collective with `serve`.

    Where no client ever came to be, the servers are told that there is nothing to serve.
    """
    if roles.client is None:
        roles.everybody.broadcast_json(None)
    else:
        roles.client.done()
    return [told for told in roles.everybody.all_gather_json(None) if told is not None]
