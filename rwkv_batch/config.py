"""The engine's settings. Plain data, made by programs/settings/ from flags and environment."""

from __future__ import annotations

import re

import msgspec

from state_pool.config import PoolConfig

STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a tuned state or an adapter: it is part of model names and of file names."""
DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4")
WKV_STATES = ("auto", "fp32", "fp16", "int8")
KERNELS = ("auto", "cuda", "cpu", "naive")
"""What `dtype`, `wkv_state` and `kernels` may be."""
ALL_BATCH_ROWS = -1
"""As `batch_rows_beside`."""
WHOLE_STEPS = -1
"""As `batch_step_layers`."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process needs to know."""

    model_path: str
    model_name: str = "rwkv7"
    dtype: str = "auto"
    """"fp32" | "bf16" | "fp16" | "fp8" | "int8" | "int4"; auto: fp16 on CUDA, fp32 on a CPU. The last three are storage
    of the large matrices, the rest is as with auto."""
    states: tuple[str, ...] = ()
    """Tuned states, as "name=file"; see `--state`."""
    adapters: tuple[str, ...] = ()
    """Adapters merged into the weights, as "file" or "file:scale"; see `--adapter`."""
    served_adapters: tuple[str, ...] = ()
    """Adapters that rows may name, as "name=file" or "name=file:scale"; see `--adapter-serve`."""
    models_dir: str = ""
    """Folder that requests may name files in; "": none."""
    devices: tuple[str, ...] = ("auto",)
    """One pipeline stage per entry ("cuda:0", "cpu"); auto: cuda:0 if there is one, else cpu."""
    layers: tuple[float, ...] = ()
    """Layers of each of `devices`, in halves, 0: what the others leave; (): dealt to take equal time, within
    their memory."""
    resident: tuple[int | None, ...] = ()
    """Of each device, layers that stay on it; the rest of its share is copied in for every step. None: all; (): all on
    all devices. A CPU's stay in any case."""
    strategy: str = ""
    """What devices, layers, resident and dtype were taken from, as the `rwkv` package writes it; "": from flags."""
    micro_batches: int = 0
    """Groups that rows which decode are dealt into, so that devices work at once; 0: as many as devices that can."""
    kernels: str = "auto"
    """One of KERNELS; auto: the fastest that run here."""
    samplers: tuple[str, ...] = ("rapid", "flashinfer", "cpu", "naive")
    """Order of preference; what is not named serves only if none of these can."""
    wkv_state: str = "auto"
    """"fp32" | "fp16" | "int8": storage of the WKV state; arithmetic is fp32 in each. auto: fp16 on CUDA, fp32
    on a CPU."""
    auto_fallback_fields: tuple[str, ...] = ()
    """Of "wkv_state" and "kernels", those that nobody asked for by name: they are those of the service's own model, and
    a model or a device that cannot have them is served as with "auto"."""
    max_running: int = 0
    """Rows that decode at once; 0: decided from free memory (GPU) or 256 (CPU)."""
    max_waiting_rows: int = 8192
    """Rows admitted but not yet running; one more is refused with OVERLOADED."""
    max_waiting_rows_per_client: int = 0
    """The same for the rows of one client; 0: three quarters of `max_waiting_rows`."""
    prefill_tokens_per_step: int = 0
    """Prompt tokens that are read in one step; 0: decided by device."""
    prefill_tokens_beside: int = 0
    """The same while rows decode, whose next tokens wait for them; 0: decided by device."""
    batch_rows_beside: int = 0
    """Batch rows that decode in one step while interactive requests come, whose first tokens wait; 0: decided by
    device, `ALL_BATCH_ROWS`: all."""
    batch_step_layers: int = 0
    """On one GPU, layers in a piece of a step with batch rows, between two of which first tokens go; 0: decided by the
    model, `WHOLE_STEPS`: it has none."""
    prefill_chunk: int = 512
    """Most prompt tokens of one row in one step."""
    gpu_memory_utilization: float = 0.9
    warmup: bool = True
    """Run every kind of step once before serving (on a GPU), so that no request waits for its first time."""
    overlap: bool = True
    """Launch step n+1 before the host has read step n, where the device allows it."""
    overlap_on_cpu: bool = False
    """The same on a CPU, where it gains nothing: for tests."""
    threads: int = 0
    """Compute threads on a CPU; 0: this engine's part of all cores."""
    replica: int = 0
    """Number of this engine among those that serve the model on this machine; of "auto", it chooses the GPU."""
    replicas: int = 1
    """How many these are: they share the machine."""
    loads_at_low_priority: bool = False
    """Loading takes few of the cores while others want them: another model is being served."""
    only_idle_cores: bool = False
    """Then it takes none that others want: the compute threads of the engines that serve leave some free."""
    drain_timeout_s: float = 30.0
    step_timeout_s: float = 120.0
    """A loop that does not come round for so long hangs: the engine process is replaced. 0: never."""
    pool: PoolConfig = PoolConfig()
