"""The settings of a training run: each field is a flag of the command line and a key of the file."""

import dataclasses
from dataclasses import dataclass

from hpctrain.config.combinations import (
    check_compress,
    check_rank_loss,
    check_reduce_dtype,
    check_resume,
    check_schedule,
    check_shard_optimizer,
    check_tuning,
    early_stop_rule,
)
from hpctrain.config.servers import check_servers
from hpctrain.config.values import UsageError, check_task, check_value, flag, flag_name
from hpctrain.plan.allreduce import CHOICES
from hpctrain.plan.devices import KINDS
from hpctrain.plan.grid import RANK_ORDERS
from hpctrain.plan.schedule import SCHEDULES

OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")
PRECISIONS = ("float32", "float64", "bf16-mixed")
REDUCE_DTYPES = ("float32", "bfloat16")
LR_SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Config:
    """A training run. Raises UsageError for a value out of range."""

    task: str = flag(
        "text", "what to train: text, images, ratings, FILE.py:Name or package.module:Name", metavar="NAME"
    )
    task_option: dict = flag(dict, "a setting of the task, such as layers=4; may be repeated", metavar="KEY=VALUE")
    data: str | None = flag(
        None, "a file or folder of your own; without it the task's built-in real data", metavar="PATH"
    )
    global_batch_size: int = flag(
        32, "rows of one update over all ranks", minimum=1, alias="--batch-size", metavar="ROWS"
    )
    stages: int = flag(1, "groups of consecutive layers, each on ranks of its own", minimum=1, metavar="S")
    rank_order: str = flag(
        "replica-fastest", "which ranks are consecutive: the replicas of a stage, or the stages", choices=RANK_ORDERS
    )
    schedule: str = flag("1f1b", "in which order a stage computes", choices=tuple(SCHEDULES))
    num_microbatches: int | None = flag(
        None,
        "pieces in which a replica computes its rows; default: 1 with one stage or naive, else 4 for each stage",
        minimum=1,
        metavar="M",
    )
    micro_batch_size: int | None = flag(
        None, "rows of such a piece, instead of --num-microbatches", minimum=1, metavar="ROWS"
    )
    chunks: int | None = flag(
        None, "groups of layers on each stage, of --schedule 1f1b-interleaved; default there: 2", minimum=1, metavar="V"
    )
    pipeline_warmup: float = flag(
        1.0,
        "forwards before the first backward, of 1f1b and zb-h1, as a multiple of the stages behind",
        minimum=0,
        metavar="X",
    )
    vertical_sync: bool = flag(False, "of 1f1b-async: all stages compute a micro-batch with the same version")
    stage_split: str = flag(
        "flops",
        "how layers are shared out: by flops or parameters, as 3,2,2,4, or by a file that `profile` wrote",
        metavar="HOW",
    )
    recompute: bool = flag(False, "keep the inputs of a stage only, and compute its forward again in the backward")
    servers: int = flag(
        0, "ranks, the last ones, that hold parameters for the others to pull and push", minimum=0, metavar="K"
    )
    staleness: float = flag(
        0,
        "rounds that a worker may be ahead of the slowest, a whole number or inf; with 0 each round is one update",
        minimum=0,
        infinite=True,
        metavar="S",
    )
    update: str = flag(
        "server",
        "who steps: the server, and pulls bring weights; or each worker, and pulls bring the gradient",
        choices=("server", "worker"),
    )
    aggregate: str = flag(
        "mean",
        "of what the workers push: mean, sum; with --staleness 0 also median, trimmed-mean, FILE.py:function",
        metavar="HOW",
    )
    delay: int = flag(0, "further rounds that a worker computes with the weights of one pull", minimum=0, metavar="D")
    delay_window: int = flag(0, "rounds before its use that a pull is asked for", minimum=0, metavar="D")
    dense_via: str = flag(
        "ps",
        "how all but the tables travels when there are servers: through them, or along the workers' ring",
        choices=("ps", "ring"),
    )
    table_optimizer: str | None = flag(
        None, "of the rows of tables, instead of --optimizer", choices=(*OPTIMIZERS, "rowwise-adagrad")
    )
    max_table_rows: int | None = flag(
        None, "rows of each table that a rank may come to hold; one more is an error", minimum=1, metavar="N"
    )
    adapt_lr: bool = flag(False, "divide the learning rate of an update by the updates that overtook it")
    straggler: str | None = flag(
        None, "RANK:FACTOR or RANK:FACTOR:PROBABILITY: slow a rank, or any, for experiments", metavar="RANK:FACTOR"
    )
    record_log: bool = flag(False, "write what each server served and applied, in order, as server-0.jsonl")
    steps: int = flag(400, "updates in all", minimum=1, metavar="N")
    epochs: int | None = flag(None, "times that every row is trained on, instead of --steps", minimum=1, metavar="N")
    optimizer: str = flag("adamw", "how weights are updated", choices=OPTIMIZERS)
    lr: float = flag(3e-3, "learning rate", above=0, below=3.4e38, metavar="RATE")
    lr_schedule: str = flag("constant", "its course from the end of the warm-up to the last step", choices=LR_SCHEDULES)
    lr_warmup_steps: int = flag(0, "steps in which it rises from near zero to --lr", minimum=0, metavar="N")
    lr_min: float = flag(0.0, "where --lr-schedule linear or cosine ends", minimum=0, metavar="RATE")
    momentum: float = flag(0.9, "of --optimizer momentum", minimum=0, below=1, metavar="SHARE")
    weight_decay: float = flag(0.0, "as torch's optimizer of that name has it", minimum=0, metavar="RATE")
    clip_norm: float | None = flag(
        None,
        "gradients longer than this, as a norm over all parameters, are shortened to it (1f1b-async: of each stage)",
        above=0,
        metavar="NORM",
    )
    shard_optimizer: bool = flag(
        False, "each replica holds the state of the optimizer for its share of the weights only, and steps that"
    )
    precision: str = flag(
        "float32",
        "of weights and arithmetic (bf16-mixed: weights in float32, products in bfloat16)",
        choices=PRECISIONS,
    )
    device: str = flag(
        "auto", "where layers are computed; auto: on CUDA devices, where every rank that trains has one", choices=KINDS
    )
    eval_every: int | None = flag(None, "steps between evaluations on the held-out rows", minimum=1, metavar="N")
    eval_batches: int | None = flag(
        None,
        "evaluate, also at the end, on N global batches of rows, evenly spread; default: on all held-out rows",
        minimum=1,
        metavar="N",
    )
    early_stop: str | None = flag(
        None,
        "METRIC:N, as loss:3: end when METRIC got no lower in N evaluations; no higher for METRIC:N:max, accuracy:N",
        metavar="METRIC:N",
    )
    loader_workers: int = flag(0, "processes of each rank that read rows ahead", minimum=0, metavar="N")
    bucket_bytes: int = flag(1 << 20, "size of the pieces in which gradients travel", minimum=1, metavar="BYTES")
    allreduce: str = flag(
        "auto",
        "how gradients are summed: by messages (ring, doubling), or in memory that a node shares (windows)",
        choices=CHOICES,
    )
    tuning: str | dict | None = flag(
        None,
        "a file that `tune` wrote, whose constants --allreduce auto goes by, and whose size of buckets is taken",
        metavar="FILE",
    )
    compress: str = flag(
        "none",
        "what is sent of gradients: all (none), rounded to bf16, the largest (topk:0.01), factors (powersgd:4)",
        metavar="HOW",
    )
    reduce_dtype: str | None = flag(
        None,
        "the dtype in which gradients travel: float32, as they are; bfloat16, as --compress bf16 has it",
        choices=REDUCE_DTYPES,
    )
    threads: int | None = flag(
        None,
        "torch threads a rank; default: OMP_NUM_THREADS, else cores of the node / ranks on it",
        minimum=1,
        metavar="N",
    )
    seed: int = flag(0, "of weights, order of rows and dropout", minimum=0, metavar="N")
    run_dir: str | None = flag(None, "folder of this run, a new one; default: runs/TASK-TIME", metavar="PATH")
    checkpoint_every: int | None = flag(
        None,
        "steps between checkpoints, from which --resume goes on; the last one is of the end",
        minimum=1,
        metavar="N",
    )
    keep_checkpoints: int = flag(2, "the newest checkpoints that stay", minimum=1, metavar="N")
    checkpoint_async: bool = flag(False, "write checkpoints while training goes on, from a copy in memory")
    resume: str | None = flag(
        None,
        "auto: go on from the newest whole checkpoint of --run-dir, or begin; or the folder of a checkpoint, of a run",
        metavar="auto|PATH",
    )
    allow_change: str | None = flag(
        None,
        "of task, task-option, data, seed, optimizer, table-optimizer: what may be another than in the checkpoint",
        metavar="NAME,NAME",
        adds_up=True,
    )
    tensorboard: bool = flag(False, "write curves for TensorBoard into the run's folder")
    trace: bool = flag(False, "write trace.json, which rank did what when: for Perfetto and for `report`")
    stall_seconds: float = flag(
        600.0,
        "no rank gets on for so long: each says what it is doing, and all end with 76",
        above=0,
        infinite=True,
        metavar="SECONDS",
    )
    on_nan: str = flag("stop", "what NaN or infinity in a loss or gradient does", choices=("stop", "skip"))
    on_rank_loss: str = flag(
        "stop",
        "of replicas and workers: the job ends, or the others continue (Open MPI 5, mpirun --with-ft ulfm)",
        choices=("stop", "continue"),
    )

    def __post_init__(self):
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None:
                check_value(flag_name(each), value, each.type, each.metadata)
        check_task(self.task)
        if self.lr_min > self.lr:
            raise UsageError(f"--lr-min {self.lr_min}: should be at most --lr {self.lr}")
        if self.early_stop is not None:
            early_stop_rule(self.early_stop)
            if self.eval_every is None:
                raise UsageError(f"--early-stop {self.early_stop}: needs --eval-every N, the steps between evaluations")
        check_schedule(self)
        check_shard_optimizer(self)
        check_compress(self)
        check_reduce_dtype(self)
        check_rank_loss(self)
        check_resume(self)
        check_servers(self)
        if isinstance(self.tuning, dict):  # the values themselves, as config.toml has them
            check_tuning(self.tuning)
