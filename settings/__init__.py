"""Every setting of the service: command-line flag, environment variable, default, meaning.

A flag `--max-running` is also read from `RWKV_MAX_RUNNING`; the command line wins. The defaults are those of
HttpConfig, EngineConfig and PoolConfig, which is where the values end up.
"""

from settings.command_line import parse_settings, program
from settings.config import Settings
from settings.flags import FLAGS
from settings.values import SettingsError

__all__ = ["FLAGS", "Settings", "SettingsError", "parse_settings", "program"]
