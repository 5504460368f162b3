"""The order in which test files go to pytest's workers. Also the slow files, and those that share a worker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

HERE = Path(__file__).resolve().parent
LONGEST = (
    "model/test_cuda_compile.py",
    "routes/test_routes_openapi.py",
    "programs/batch/test_batch_resume.py",
    "routes/test_http_lifecycle.py",
    "routes/test_http_fine_tuning.py",
    "routes/web/test_chat.py",
    "engine/test_prompt_scoring.py",
    "fleet/test_actors.py",
    "routes/test_constraints.py",
    "programs/serve/test_http_workers.py",
    "routes/test_http_faults.py",
    "engine/test_step_parts.py",
    "engine/test_speculation.py",
    "fleet/test_replicas.py",
    "state_pool/test_pool_shared.py",
    "state_pool/test_pool_killed.py",
    "simulation/test_simulation.py",
    "engine/test_engine.py",
    "engine/test_batch_invariance.py",
    "engine/test_mixtures.py",
    "programs/test_terminal.py",
    "programs/batch/test_openai_batches.py",
    "programs/batch/test_batch_page.py",
    "sampling/test_marker_cases.py",
    "engine/test_constraints.py",
    "engine/test_engine_sessions.py",
    "state_pool/test_pool_crash.py",
    "programs/serve/test_model_engines.py",
    "fuzzing/test_readers.py",
    "routes/test_body_limits.py",
    "model/test_w8a8_emulated.py",
    "routes/test_http_demo.py",
    "routes/test_http_session_files.py",
    "programs/batch/test_examples.py",
    "routes/test_http_adapters.py",
    "routes/test_http_failing_calls.py",
    "routes/test_http_states.py",
    "programs/serve/test_listeners.py",
    "programs/serve/test_forks.py",
    "routes/test_tenants.py",
    "model/test_older_versions.py",
    "model/test_gguf_quality.py",
    "deploy/test_wheel.py",
    "engine/test_micro_batches.py",
    "routes/test_text_paths.py",
    "state_pool/test_pool_model.py",
    "engine/test_layer_stream.py",
    "programs/library/test_library_page.py",
    "deploy/test_cluster_proxy.py",
    "engine/test_jump_forward.py",
    "engine/test_served_adapters.py",
    "model/test_weights.py",
    "model/test_codes_emulated.py",
    "engine/test_state_forms.py",
    "engine/test_continuations.py",
    "engine/test_fairness.py",
    "engine/test_tuned_states.py",
    "model/test_cpu_kernels.py",
    "routes/test_raw_socket.py",
    "programs/library/test_pipeline.py",
    "fleet/test_resumed_rows.py",
    "engine/test_preemption.py",
    "model/test_gemm_fp8_emulated.py",
    "model/test_sparse_emulated.py",
    "model/test_shift_mix_emulated.py",
    "model/test_skinny_emulated.py",
    "model/test_wkv_emulated.py",
    "routes/test_openai_routes.py",
    "state_pool/test_pool_nth_failure.py",
    "test_document_examples.py",
    "model/test_quant_store.py",
    "model/test_w8a8_instructions.py",
    "programs/batch/test_batch_limits.py",
    "routes/test_generated_bodies.py",
)
"""Longest first, below `test/`, so that no long file runs alone at the end. Times: `pytest --durations=400`."""
DAILY = frozenset(
    {
        "engine/test_engine.py",
        "engine/test_constraints.py",
        "engine/test_engine_sessions.py",
        "engine/test_fairness.py",
        "engine/test_preemption.py",
        "engine/test_continuations.py",
        "state_pool/test_pool_shared.py",
        "state_pool/test_pool_model.py",
        "model/test_weights.py",
        "model/test_cpu_kernels.py",
        "routes/test_openai_routes.py",
    }
)
"""Of the longest, those that `make test` runs too. The others are marked `slow`, as are all below SLOW_FOLDERS."""
SLOW_FOLDERS = ("bench/", "demo/", "deploy/", "fleet/", "typing/", "routes/web/")
SHARING = {
    "service": (
        "routes/test_routes_openapi.py",
        "programs/batch/test_examples.py",
        "deploy/test_files.py",
        "programs/library/test_llm.py",
        "routes/test_body_limits.py",
        "routes/test_completion_scoring.py",
        "routes/test_http_input.py",
        "routes/test_http_routes.py",
        "routes/test_http_session_files.py",
        "routes/test_lm_eval.py",
        "routes/test_openai_errors.py",
        "routes/test_openai_node.py",
        "routes/test_routes_answers.py",
        "routes/test_sampler_fields.py",
        "routes/test_routes_batch.py",
        "routes/test_routes_sessions.py",
        "routes/test_score.py",
        "routes/test_tool_constraints.py",
        "programs/batch/test_batch_page.py",
        "programs/batch/test_openai_batches.py",
    ),
    "fake": (
        "programs/batch/test_translate.py",
        "programs/batch/test_batch_resume.py",
        "programs/batch/test_batch_files.py",
        "programs/batch/test_hostile_inputs.py",
        "programs/chat/test_console.py",
        "programs/test_terminal.py",
        "routes/test_ignored_fields.py",
        "routes/test_model_names.py",
        "routes/test_anthropic.py",
        "routes/test_llama_cpp.py",
        "routes/test_ollama.py",
        "routes/test_agents.py",
        "routes/test_browser_requests.py",
        "routes/test_responses.py",
        "routes/test_tools.py",
    ),
    "locked_fake": (
        "routes/test_translation_clients.py",
        "routes/test_document_routes.py",  # also with `two_keys`, like the next
        "routes/test_glossaries.py",
        "routes/test_translation_memory.py",
    ),
    "emulated": (  # they share the compiled form of CUDA's headers
        "model/test_codes_emulated.py",
        "model/test_gemm_fp8_emulated.py",
        "model/test_input_projections_emulated.py",
        "model/test_shift_mix_emulated.py",
        "model/test_skinny_emulated.py",
        "model/test_sparse_emulated.py",
        "model/test_w8a8_emulated.py",
        "model/test_wkv_emulated.py",
    ),
    "one_worker": ("routes/test_constraints.py", "routes/test_constrained_texts.py"),
    "demo": (
        "routes/web/test_chat.py",
        "routes/web/test_accessibility.py",
        "routes/web/test_batch.py",
        "routes/web/test_answers.py",
        "routes/web/test_dashboard.py",
        "routes/web/test_page.py",
        "routes/web/test_translate.py",
        "routes/web/test_tune.py",
    ),
}
"""Fixture of a service, or a name -> files whose tests ask for it: one worker has them all, and it is started once.

Another start of it takes seconds of processor time, and each that idles a fiftieth of a core.
"""
GROUPS = {name: fixture for fixture, names in SHARING.items() for name in names}


class GroupScheduling(LoadFileScheduling):
    """`--dist loadfile`, but files that share a service go to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])

    def remove_node(self, node: WorkerController) -> str | None:
        """Forget a worker's finished files: after a crash, xdist would wait for their end in another worker."""
        files = self.assigned_work[node]
        for name in [name for name, tests in files.items() if all(tests.values())]:
            del files[name]
        return super().remove_node(node)

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker two tests, or tell it to end: it never begins its last test otherwise.

        xdist gives one file to a worker that replaces a crashed one.
        """
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Return the scheduler for pytest's workers; None: xdist's own for its `--dist`."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def group(file: str) -> str:
    """Return the scheduling group of a file: a service's name, or its path from the repository root."""
    return GROUPS.get(file.removeprefix("test/"), file)


def sort_key(path: Path) -> tuple[int, str, int]:
    """Return a file's position: smaller runs earlier. Files of a group follow each other."""
    name = path.relative_to(HERE).as_posix()
    shared = GROUPS.get(name, "")
    return min(map(_position, SHARING[shared])) if shared else _position(name), shared, _position(name)


def _position(name: str) -> int:
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def is_slow(path: Path) -> bool:
    """Return whether `make test` leaves this file out."""
    name = path.relative_to(HERE).as_posix()
    return name.startswith(SLOW_FOLDERS) or (name in LONGEST and name not in DAILY)


def missing_files() -> list[str]:
    return [name for name in (*LONGEST, *DAILY, *GROUPS) if not (HERE / name).exists()]


def unlisted_files(items: Iterable[pytest.Item]) -> list[str]:
    """Return files that use a shared service but are in no group."""
    asking = {item.path.relative_to(HERE).as_posix() for item in items if shared(item) is not None}
    return sorted(asking - GROUPS.keys())


def shared(item: pytest.Item) -> pytest.FixtureDef[Any] | None:
    """Return the shared service fixture that a test uses."""
    found = getattr(item, "_fixtureinfo", None)
    fixtures = found.name2fixturedefs if found else {}
    asked = (fixtures[name][-1] for name in SHARING if name in fixtures)
    return next((one for one in asked if one.scope in ("session", "package")), None)
