"""The command line of `chat`. It does not import the engine, so help is fast."""

from __future__ import annotations

from programs.settings import CommandParser

_HISTORY = "~/.rwkv_chat_history"


def build_parser() -> CommandParser:
    """Returns the parser of `chat`. Other flags are the service's."""
    parser = CommandParser(
        "chat",
        "Talks to the model on a terminal; /help there lists the commands. Piped lines are messages too. Takes the "
        "engine's flags of serve: --model-path, --pp-devices, --dtype ...",
        "--model-path model.gguf --set temperature 0.5\n--url http://127.0.0.1:8000 --load talk.json",
        takes_settings=True,
    )
    parser.add_argument("--url", default="", help="running service to use instead of an engine in this process")
    parser.add_argument("--load", default="", metavar="FILE", help="conversation file written by /save")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="as /set does")
    parser.add_argument(
        "--history", default=_HISTORY, metavar="FILE", help=f"history file of the typed lines; default: {_HISTORY}"
    )
    return parser
