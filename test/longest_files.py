"""Which files of tests take longest: they are dealt first, so that none is left at the end."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
LONGEST = (
    "model/test_cuda_compile.py",
    "routes/test_http_lifecycle.py",
    "engine/test_engine_parts.py",
    "simulation/test_simulation.py",
    "cluster/test_replicas.py",
    "routes/test_routes_openapi.py",
    "web/test_page.py",
    "engine/test_engine.py",
    "cluster/test_actors.py",
    "state_pool/test_pool_crash.py",
    "supervisor/test_model_engines.py",
    "state_pool/test_pool_service.py",
    "web/test_chat.py",
    "engine/test_micro_batches.py",
    "bulk/test_openai_batches.py",
    "routes/test_text_paths.py",
    "state_pool/test_pool_model.py",
    "supervisor/test_http_workers.py",
    "bulk/test_batch_resume.py",
    "engine/test_layer_stream.py",
    "routes/test_http_faults.py",
    "engine/test_engine_sessions.py",
    "library/test_library_page.py",
    "bench/test_mutants.py",
    "state_pool/test_pool_shared.py",
    "engine/test_certain_text.py",
    "routes/test_http_session_files.py",
    "deploy/test_cluster_proxy.py",
    "model/test_weights.py",
    "engine/test_mixtures.py",
    "model/test_older_versions.py",
    "web/test_batch.py",
    "model/test_codes_emulated.py",
    "model/test_cpu_kernels.py",
    "routes/test_raw_socket.py",
    "library/test_pipeline.py",
    "deploy/test_wheel.py",
)
"""In this order, beneath `test/`; all others come after. Times: `pytest --durations=400`, summed by file."""


def turn(path: Path) -> int:
    """When a file's tests are dealt: the smaller, the sooner."""
    name = path.relative_to(HERE).as_posix()
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def missing() -> list[str]:
    """Those named above that are not there."""
    return [name for name in LONGEST if not (HERE / name).exists()]
