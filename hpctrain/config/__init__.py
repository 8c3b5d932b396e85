"""Everything a run can be told: one dataclass, seen as command line and as TOML.

All validation is here; an error is one line that names the flag or the key and what would work. Standard library only
(and tomli where Python has no tomllib): `--help` and every mistake answer at once.
"""

from hpctrain.config.combinations import early_stop_rule
from hpctrain.config.read import Parser, parse, parser, read_toml, to_toml
from hpctrain.config.settings import OPTIMIZERS, Config
from hpctrain.config.values import UsageError, flag_name

__all__ = [
    "OPTIMIZERS",
    "Config",
    "Parser",
    "UsageError",
    "early_stop_rule",
    "flag_name",
    "parse",
    "parser",
    "read_toml",
    "to_toml",
]
