"""An engine that the database cannot hear, while everybody else can."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

from bench.acceptance.clients import CHAT, Clients, at_once, failures, ms, part
from bench.acceptance.database_link import linked
from bench.acceptance.engines import running
from bench.acceptance.ledger import Ledger
from bench.acceptance.streams import stream_body
from test.postgres import Server

BEFORE_S, CUT_S, AFTER_S = 6.0, 14.0, 12.0
"""Turns wait ten seconds for the database, and are refused at once from then on."""
FEW_CLIENTS = 4


async def database_cut(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Of several engines one loses PostgreSQL alone: it computes, and nothing that it says counts."""
    whole_s = BEFORE_S + CUT_S + AFTER_S
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(await asyncio.to_thread(Server)))
        address, link = stack.enter_context(linked(server.database()))
        engines = stack.enter_context(running(options.engines, "--state-db", address, *flags))
        async with Clients(engines.url) as clients:
            ledger = Ledger(clients)
            await ledger.calibrate()
            names = [f"talk-{number}" for number in range(options.sessions)]
            victim = await asyncio.to_thread(engines.pid, "engine-0")
            begun = time.perf_counter()

            async def cut() -> None:
                await asyncio.sleep(BEFORE_S)
                link.cut(victim)
                await asyncio.sleep(CUT_S)
                link.mend()

            stateless, *_ = await asyncio.gather(
                at_once(lambda n: clients.post(CHAT, stream_body(n, 16)), FEW_CLIENTS, whole_s),
                cut(),
                *(ledger.chat(name, whole_s) for name in names),
            )
            faults = await ledger.check()
    at = {phase: BEFORE_S + seconds for phase, seconds in (("cut", 2.0), ("mended", CUT_S))}
    told = [answer for _, answer in ledger.turns if not answer.is_good]
    good = [(name, answer.ended - begun) for name, answer in ledger.turns if answer.is_good]
    meanwhile = {name for name, ended in good if at["cut"] < ended < at["mended"]}
    recovered = {name for name, ended in good if ended > at["mended"]}
    during = [one for one in stateless if at["cut"] < one.began - begun < at["mended"]]
    went_on = bool(meanwhile) and len(recovered) == len(names)
    return {
        "ok": not faults and not failures(stateless) and went_on and link.held > 0,
        "faults": faults[:3],
        "stateless": {"all": len(stateless), "during": len(during), "failed": len(failures(stateless))},
        "stateless_first_ms_p99_during": ms(part([one.first_s for one in during], 0.99)),
        "turns": {"acknowledged": len(good), "refused": len(told)},
        "pieces_held_back": link.held,
        "refused_as": dict(Counter(f"{one.status} {one.error[:160]}" for one in told)),
        "longest_wait_s": round(max((one.whole_s for _, one in ledger.turns), default=0.0), 2),
        "sessions": len(names),
        "sessions_that_went_on_meanwhile": len(meanwhile),
        "sessions_that_went_on_afterwards": len(recovered),
    }
