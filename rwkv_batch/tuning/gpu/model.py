"""The training model on NVIDIA GPUs."""

from __future__ import annotations

from rwkv_batch.tuning.fused import FusedTrainingModel, Kernels
from rwkv_batch.tuning.gpu.mix import ShiftedNorm, SquaredRelu
from rwkv_batch.tuning.gpu.wkv import TimeCore


class GpuTrainingModel(FusedTrainingModel):
    """Trains states and LoRAs in bf16."""

    kernels = Kernels(ShiftedNorm, SquaredRelu, TimeCore)
