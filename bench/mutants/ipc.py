"""Mutants of the links between the processes."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

LINKS = "test/engine/test_engine_links.py"
WIRE = ("test/engine/test_wire.py", "test/engine/test_calls.py")

MUTANTS: list[Mutant] = [
    *of(
        "rwkv_batch/ipc/wire.py",
        WIRE,
        [
            (
                "            if not self._waiting:\n                frame = frame[self._send_now(frame) :]\n",
                "            frame = frame[self._send_now(frame) :]\n",
                "news overtake each other to a worker that lags",
                "test/engine/test_wire.py::test_what_is_sent_to_a_peer_that_lags_overtakes_nothing",
            ),
            (
                "        if len(self._waiting) > MAX_WAITING_FRAMES or self._waiting_bytes > MAX_WAITING_BYTES:\n",
                "        if False:\n",
                "a worker that hangs fills the engine's memory",
                "test/engine/test_wire.py::test_a_peer_that_reads_nothing_is_cut_off",
            ),
            (
                "                    self._waiting.popleft()\n                    self._waiting_bytes -= len(frame)\n",
                "                    self._waiting.popleft()\n",
                "a worker that once lagged is cut off later",
                "test/engine/test_wire.py::test_who_has_caught_up_may_lag_again",
            ),
            (
                "            if not count:\n                return None\n",
                "            if not count:\n                return body\n",
                "half a frame is read as one",
            ),
            (
                "            if size and size + more > frame_bytes:\n",
                "            if False:\n",
                "a long answer is one frame that cuts the worker off",
                "test/engine/test_wire.py::test_news_of_a_step_go_in_frames_of_bounded_size",
            ),
            (
                "rest = event if first == 0 else msgspec.structs.replace(event, deltas=event.deltas[first:])",
                "rest = event",
                "deltas at the border of a frame come twice",
                "test/engine/test_wire.py::test_news_of_a_step_go_in_frames_of_bounded_size",
            ),
        ],
    ),
    *of(
        "rwkv_batch/ipc/client.py",
        (*WIRE, "test/routes/test_http_faults.py", "test/routes/test_http_lifecycle.py"),
        [
            (
                "            tell.append(partial(listener.sink, JobEvents(job_id=job_id, deltas=[], done=True, error=error)))\n",
                "",
                "who waits when the engine dies waits for ever",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
            (
                "        tell.extend(partial(asked.reply, ServiceError.from_info(lost)) for asked in waiting.calls.values())\n",
                "",
                "a call that waits when the engine dies is never answered",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
            (
                "            error = lost_turn if listener.is_turn else lost\n",
                "            error = lost\n",
                "a turn that may be kept is told to be sent again",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
            (
                "                if error is not None:\n                    self._waiting.listeners.pop(job_id, None)\n",
                "",
                "refused jobs are kept for ever",
                f"{LINKS}::test_jobs_that_were_refused_or_have_ended_are_forgotten",
            ),
            (
                "            waiting, self._waiting = self._waiting, _Waiting()\n",
                "            waiting = self._waiting\n",
                "jobs of a dead engine are told of twice",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
            (
                "pop = self._waiting.listeners.pop if events.done else self._waiting.listeners.get",
                "pop = self._waiting.listeners.get",
                "jobs that have ended are kept for ever",
                f"{LINKS}::test_jobs_that_were_refused_or_have_ended_are_forgotten",
            ),
            (
                "                each_is_told.callback(act)\n",
                "                act()\n",
                "a fault of one waiter keeps the others waiting when the engine dies",
                f"{LINKS}::test_a_waiter_that_raises_keeps_nobody_from_hearing_of_the_loss",
            ),
            (
                "= [partial(self._on_change, False)]\n",
                "= []\n",
                "/readyz says ready without an engine",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
        ],
    ),
    *of(
        "rwkv_batch/ipc/server.py",
        (*WIRE, "test/engine/test_threads.py", "test/routes/test_http_faults.py", "test/routes/test_http_lifecycle.py"),
        [
            (
                "            for job_id in list(self.jobs):\n",
                "            for job_id in ():\n",
                "jobs of a dead worker run on",
                f"{LINKS}::test_a_worker_that_is_gone_leaves_nothing_behind",
            ),
            (
                "            self._peers.discard(peer)\n",
                "            pass\n",
                "dead workers are kept for ever",
                f"{LINKS}::test_a_worker_that_is_gone_leaves_nothing_behind",
            ),
            (
                "        if events.done:\n            self.jobs.discard(events.job_id)\n",
                "",
                "ended jobs are kept for ever",
                f"{LINKS}::test_a_worker_that_is_gone_leaves_nothing_behind",
            ),
        ],
    ),
]
