"""Every setting of the service: command-line flag, environment variable, default, meaning.

A flag `--max-running` is also read from `RWKV_MAX_RUNNING`; the command line wins. The defaults are those of
HttpConfig, EngineConfig and PoolConfig, which is where the values end up.
"""

from programs.settings.command_line import parse_settings
from programs.settings.config import Settings
from programs.settings.flags import FLAGS
from programs.settings.parser import CommandParser, program, reports_errors
from programs.settings.values import SettingsError

__all__ = ["FLAGS", "CommandParser", "Settings", "SettingsError", "parse_settings", "program", "reports_errors"]
