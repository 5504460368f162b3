"""The engine's settings. Plain data; programs/settings/ creates it from flags and environment variables."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from state_pool.config import PoolConfig

STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid names of tuned states and adapters. They are part of model names and file names."""
DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4")
ACTIVATION_BITS = (8, 16)
WKV_STATES = ("auto", "fp32", "fp16", "int8")
KERNELS = ("auto", "cuda", "cpu", "naive")
SPECULATE = ("off", "auto", "ngram", "model")
"""allowed values of `dtype`, `activation_bits`, `wkv_state`, `kernels` and `speculate`"""
ALL_BATCH_ROWS = -1
"""value of `max_batch_rows_with_interactive`"""
WHOLE_STEPS = -1
"""value of `batch_step_layers`"""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    model_name: str = "rwkv7"
    dtype: str = "auto"
    """"fp32" | "bf16" | "fp16" | "fp8" | "int8" | "int4"; auto: fp16 on CUDA, fp32 on a CPU

    fp8, int8 and int4 are storage formats of the large matrices; everything else is as with auto.
    """
    activation_bits: int = 8
    """bits of the inputs of int8's matrices, one of ACTIVATION_BITS"""
    deterministic: bool = False
    """a text's bits depend on its own tokens only, at any load; fp16 and int8; on CPUs always so"""
    states: tuple[str, ...] = ()
    """tuned states as "name=file"; see `--state`"""
    adapters: tuple[str, ...] = ()
    """adapters merged into the weights, as "file" or "file:scale"; see `--adapter`"""
    served_adapters: tuple[str, ...] = ()
    """adapters that rows may name, as "name=file" or "name=file:scale"; see `--adapter-serve`"""
    models_dir: str = ""
    """folder from which requests may name files; "": none"""
    devices: tuple[str, ...] = ("auto",)
    """one pipeline stage per entry ("cuda:0", "cpu"); auto: cuda:0 if there is one, else cpu"""
    layers: tuple[float, ...] = ()
    """layers of each device, in halves; 0: the rest; (): split so that stages take equal time, within their memory"""
    resident: tuple[int | None, ...] = ()
    """per device, layers that stay on it; the others are copied in for every step

    None: all; (): all on all devices. On a CPU all layers stay.
    """
    strategy: str = ""
    """the `rwkv` package's strategy that set devices, layers, resident and dtype; "": set by flags"""
    micro_batches: int = 0
    """groups of decoding rows, so that devices work at the same time; 0: one per device that can overlap"""
    kernels: str = "auto"
    """one of KERNELS; auto: the fastest that runs here"""
    samplers: tuple[str, ...] = ("rapid", "flashinfer", "cpu", "naive")
    """in order of preference; other samplers serve only if none of these can"""
    wkv_state: str = "auto"
    """"fp32" | "fp16" | "int8": storage of the WKV state, with fp32 arithmetic; auto: fp16 on CUDA, fp32 on a CPU"""
    auto_fallback_fields: tuple[str, ...] = ()
    """fields among "wkv_state" and "kernels" that fall back to "auto" if the model or device does not support them

    They are inherited from the service's own model, not set by the user.
    """
    speculate: str = "off"
    """one of SPECULATE: whether rows verify guesses of their next tokens

    auto: where measured times say that it pays; ngram: wherever the text has a guess; model: always `draft_model`'s.
    """
    draft_model: str = ""
    """file of a small model that guesses tokens for `speculate`; "": none"""
    max_running: int = 0
    """rows that decode at once; 0: from free memory (GPU) or 256 (CPU)"""
    max_waiting_rows: int = 8192
    """rows admitted but not running; more are refused with OVERLOADED"""
    max_waiting_rows_per_client: int = 0
    """the same per client; 0: three quarters of `max_waiting_rows`"""
    prefill_tokens_per_step: int = 0
    """prompt tokens read per step; 0: by device"""
    max_prefill_tokens_with_decode: int = 0
    """the same in steps in which rows decode; 0: by device"""
    max_batch_rows_with_interactive: int = 0
    """batch rows that decode in a step while interactive requests arrive; 0: by device, `ALL_BATCH_ROWS`: all"""
    batch_step_layers: int = 0
    """layers per piece of a step with batch rows, on one GPU; 0: by model, `WHOLE_STEPS`: no pieces

    Interactive prefill runs between two pieces.
    """
    prefill_chunk: int = 512
    """maximum prompt tokens of a row per step"""
    gpu_memory_utilization: float = 0.9
    warmup: bool = True
    """run every kind of step once before serving (on a GPU), so that no request waits for compilation"""
    overlap: bool = True
    """launch step n+1 before the host has read step n, where the device supports it"""
    overlap_on_cpu: bool = False
    """the same on a CPU, without a gain: for tests"""
    threads: int = 0
    """compute threads on a CPU; 0: this engine's share of all cores"""
    replica: int = 0
    """this engine's index among the replicas on this machine; with "auto" it selects the GPU"""
    replicas: int = 1
    loads_at_low_priority: bool = False
    """load with few cores while other processes need them: another model is being served"""
    only_idle_cores: bool = False
    """with it, use only idle cores; compute threads of serving engines leave some free"""
    drain_timeout_s: float = 30.0
    step_timeout_s: float = 120.0
    """seconds without progress after which the engine's process is replaced; 0: never"""
    pool: PoolConfig = PoolConfig()

    @property
    def uses_draft_model(self) -> bool:
        return bool(self.draft_model) and self.speculate not in ("off", "ngram")

    @property
    def pool_of_model(self) -> PoolConfig:
        """The pool's settings with the name of the weights' file. The name is for users of another model."""
        return msgspec.structs.replace(self.pool, model_file=Path(self.model_path).name)
