"""What several engines on one machine must withstand: each mode is a test with a bound, `ok` says whether it held.

    python -m bench.acceptance MODE [--streams N] [--rounds N] [--engines N] ... [flags of app.py]

`kills`: `--streams` streams while an engine is killed, `--rounds` times; each text is that of an undisturbed run, the
    longest gap between two pieces of a stream is below 5 s at the 99th of a hundred. Bounded by the cores: what a lost
    engine had begun is read again by the others, and an engine that starts needs seconds of a core.
`partition`: an engine stands still for 10 s in the middle of turns, `--rounds` times; what it acknowledges counts once.
`database-down`: PostgreSQL is away for 14 s; requests without a session go on, turns wait and are refused, none is
    acknowledged that is not kept.
`database-cut`: one engine of several loses PostgreSQL for 14 s: it computes and acknowledges nothing, requests without
    a session do not notice, and afterwards all sessions go on.
`head-away`: engines are actors of a Ray cluster whose head, its memory in a Redis that is played, dies for `--seconds`:
    streams and new requests go on with the same texts; an engine that is removed meanwhile leaves when it is back.
`moved`: `--sessions` sessions go on with other engines: from a checkpoint with the same bits, by replay with the same
    `--max-tokens` greedy tokens.
`same-session`: two turns of each session at once over two HTTP workers: one waits for the other, or is refused.
`deleted`: sessions on all tiers, and with a turn under way, are deleted; nothing is left, a later turn is the first.
`rolling`: all engines are started anew under 0.8 of what they carry together: no request fails, the time to the first
    token is below three times the usual at the 99th of a hundred. While one is away the others must carry all: six
    engines or more.
`slow-engine`: one of two gets a fifth of the time: from two seconds on it is given less than a third.
`hot-tenant`: one of five clients sends ten times as much: the others' first tokens come within twice the usual time.
`overload`: three times what the engines carry: 429 with Retry-After, 0.95 of the usual answers, bounded memory.

In the last four an engine has `--rows` places and a step takes `--step-ms`, so that what engines carry is set and not
this machine's cores; a machine that is busy otherwise shows in the times all the same.

The last line is JSON; exit status 1 unless `ok`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.acceptance.cuts import database_cut
from bench.acceptance.head import head_away
from bench.acceptance.load import hot_tenant, overload, rolling, slow_engine
from bench.acceptance.moves import moved
from bench.acceptance.sessions import database_down, deleted, partition, same_session
from bench.acceptance.streams import kills
from bench.tools.origin import origin

Mode = Callable[[argparse.Namespace, list[str]], Awaitable[dict[str, Any]]]
MODES: dict[str, Mode] = {
    "kills": kills,
    "database-down": database_down,
    "database-cut": database_cut,
    "head-away": head_away,
    "partition": partition,
    "same-session": same_session,
    "deleted": deleted,
    "moved": moved,
    "rolling": rolling,
    "hot-tenant": hot_tenant,
    "overload": overload,
    "slow-engine": slow_engine,
}


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=sorted(MODES))
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4, help="places of an engine, where load is measured")
    parser.add_argument("--step-ms", type=float, default=60.0, help="least time of a step there")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part of a load")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--within", type=float, default=1e9, help="seconds after which `kills` begins no more rounds")
    parser.add_argument("--out", type=Path, help="file for what the last line says")
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_known_args(arguments)


def main() -> None:
    """Run the mode and print its figures."""
    options, flags = parse()
    figures = asyncio.run(MODES[options.mode](options, flags))
    last = {"bench": "acceptance", "mode": options.mode, **figures, **origin(options.commit)}
    if options.out is not None:
        options.out.write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last))
    sys.exit(not figures["ok"])


if __name__ == "__main__":
    main()
