"""Everything that HTTP workers have in common, made once in the process that they are forked from.

That process imports this module and starts no thread. A new worker then needs some 20 ms instead of two seconds, and
shares the memory of what it does not change.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

gc.disable()  # see rwkv_batch.ipc.process.without_collections
# A manager that signals the whole group means the supervisor, which ends the others in order.
for _signal in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_signal, signal.SIG_IGN)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would not live in what is forked
# Robyn reads sys.argv when it is imported, abbreviations and all.
sys.argv = [sys.argv[0], "--log-level", "WARN", "--disable-openapi"]
for _name in ("ROBYN_HOST", "ROBYN_PORT", "ROBYN_DEV_MODE", "ROBYN_BROWSER_OPEN"):
    os.environ.pop(_name, None)

import uvloop  # noqa: E402, F401  # Robyn imports it when it starts

from routes import web_page  # noqa: E402
from routes.docs.openapi import openapi_document  # noqa: E402
from routes.serving import http, listen_socket  # noqa: E402, F401  # Robyn with them
from routes.table import ROUTES  # noqa: E402
from rwkv_batch.tokenizer import Tokenizer, make_tables  # noqa: E402

make_tables()
TOKENIZER = Tokenizer()
OPENAPI_DOCUMENT = openapi_document(ROUTES)
WEB_FILES = web_page.read_files()
# What was loaded stays: a full collection that walks all of it stops every stream for 10 ms, and unshares its memory.
gc.freeze()
gc.enable()
