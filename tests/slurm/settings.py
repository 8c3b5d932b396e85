"""The files that a Slurm of our own is configured by."""

from __future__ import annotations

import socket
from pathlib import Path

CGROUP = "CgroupPlugin=cgroup/v1\n"  # which we do not use, but slurmd looks for what is mounted
CONF = """\
ClusterName=hpctrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# how long a job that is queued again waits at least
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
# one for each node: the PMIx servers of two nodes would meet in /tmp
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# nodes have as many cores as they say, and come back from whatever they were down for
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SlurmdTimeout=10
KillWait=5
PropagateResourceLimits=NONE
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""
NODE = "NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN\n"


def slurm_conf(folder: Path, nodes: list[str], cpus: int, ports: list[int]) -> str:
    """For a slurmctld on the first of `ports`, and a slurmd on each of the others."""
    host = socket.gethostname().split(".")[0]
    first, *others = ports
    lines = [NODE.format(node=node, host=host, port=port, cpus=cpus) for node, port in zip(nodes, others)]
    return CONF.format(host=host, port=first, folder=folder) + "".join(lines)
