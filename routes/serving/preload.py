"""Imports and builds everything that HTTP workers share.

It does so in the process that they are forked from. That process imports this module and starts no threads. A new
worker starts in 20 ms instead of 2 s, and shares the memory that it does not change.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

gc.disable()  # see rwkv_batch.ipc.process.gc_paused
# A signal to the whole process group is for the supervisor, which stops the others in order.
for _signal in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_signal, signal.SIG_IGN)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would not survive the fork
# Robyn parses sys.argv when it is imported, and accepts abbreviations.
sys.argv = [sys.argv[0], "--log-level", "WARN", "--disable-openapi"]
for _name in ("ROBYN_HOST", "ROBYN_PORT", "ROBYN_DEV_MODE", "ROBYN_BROWSER_OPEN"):
    os.environ.pop(_name, None)


import uvloop  # noqa: E402, F401  # Robyn imports it at start

from routes import web_page  # noqa: E402
from routes.serving import http, listen_socket  # noqa: E402, F401  # these import Robyn
from routes.table import ROUTES  # noqa: E402
from rwkv_batch.tokenizer import Tokenizer, make_tables  # noqa: E402

for _route in ROUTES:  # so that no worker builds validators while it serves
    for _model in filter(None, (_route.body, _route.query)):
        _model.model_rebuild()
make_tables()
TOKENIZER = Tokenizer()
WEB_FILES = web_page.read_files()
# Exclude these objects from collections: walking them stops all streams for 10 ms and unshares their memory.
gc.freeze()
gc.enable()
