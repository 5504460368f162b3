"""The parts of a layer on a CUDA device: fp16 with fp32 sums.

"As naive" means: computes the same as that function of kernels/naive.py, which is the definition. model/ops.py
describes the arguments, model/layer.py the letters.

Weights may be quantised. Rows are then quantised too: to one fp8 value per input, or to two ("two-part rows",
quantised_rows.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from native import machine
from rwkv_batch.kernels.cuda import draft_step
from rwkv_batch.kernels.cuda.adapters import CudaAdapterTable, has_adapters
from rwkv_batch.kernels.cuda.channel_mix import channel_mix
from rwkv_batch.kernels.cuda.hopper_gemm import (
    has_hopper_gemm,
    hopper_gemm_unavailable_reason,
    is_mps_active,
    prepare_hopper_gemm,
)
from rwkv_batch.kernels.cuda.input_projections import project
from rwkv_batch.kernels.cuda.layer import CudaLayer, prepare_layer
from rwkv_batch.kernels.cuda.library import (
    WkvArgs,
    cuda_pointer,
    library,
    library_unavailable_reason,
    slots_pointer,
)
from rwkv_batch.kernels.cuda.linear import CudaLinear
from rwkv_batch.kernels.cuda.low_ranks import CudaProjections
from rwkv_batch.kernels.cuda.packed_weights import transposed_buffer
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear, CudaQuantValue, make_quantised
from rwkv_batch.kernels.cuda.quantised_gemm import multiply_to_partials
from rwkv_batch.kernels.cuda.quantised_rows import (
    DeferredMix,
    MixedInputs,
    PartialSums,
    QuantisedRows,
    RowSums,
    SingleRowInput,
    add_exact_sums,
    add_partial_sums,
    add_sums,
)
from rwkv_batch.kernels.cuda.shift_mix import MAX_WIDTH, shift_and_mix
from rwkv_batch.kernels.cuda.w8a8.products import ExactSums
from rwkv_batch.kernels.cuda.workspace import Workspace
from rwkv_batch.model.adapter_table import AdaptedLinear, LayerAdapters
from rwkv_batch.model.layer import Layer, Linear, Norm, Projections
from rwkv_batch.model.low_rank import Target
from rwkv_batch.model.quant.w8a8 import Codes
from rwkv_batch.model.state import HEAD_SIZE, ModelShape, StateArena
from rwkv_batch.model.step_inputs import StepInputs

FFN_STEP, MAX_FFN = 64, 16384
SHORT_TOKENS = 5
"""Tokens of rows on average up to which the WKV goes token by token: a chunk takes as long for 1 token as for 16."""


class CudaOps:
    """Backend of own CUDA kernels and cuBLAS. Its methods check and prepare; modules of the same names launch."""

    name = "cuda"
    make_quantised = staticmethod(make_quantised)
    make_adapter_table = CudaAdapterTable
    shift_mix = shift_and_mix

    def __init__(self) -> None:
        self.is_deterministic = False
        self.workspaces: dict[torch.device, Workspace] = {}
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Returns why it cannot run, None if it can.

        Requires an NVIDIA GPU of sm_80 or later, and nvcc.
        """
        if device.type != "cuda":
            return f"the cuda kernels do not run on {device.type}"
        if torch.version.hip is not None:
            return "the cuda kernels use NVIDIA's matrix instructions; this is a ROCm build of torch"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 0):
            return f"the cuda kernels need compute capability 8.0; this GPU has {major}.{minor}"
        return machine.cuda_unavailable_reason(device) or library_unavailable_reason()

    def missing_kernels(self, device: torch.device) -> dict[str, str]:
        """Return why optional kernels do not run on the device; the service works without them.

        "wide": the Hopper GEMMs (hopper_gemm.py), which take steps of many rows.
        """
        reason = hopper_gemm_unavailable_reason(device)
        return {} if reason is None else {"wide": reason}

    def make_linear(self, weight: Tensor) -> CudaLinear:
        """Return the linear map of an fp16 weight [out, in]."""
        return CudaLinear(weight, self.is_deterministic)

    def become_deterministic(self, device: torch.device) -> None:
        """Guarantee that a row's bits depend on its own tokens and state only.

        Called before layers are prepared. Raises ValueError for a GPU without the kernels.
        """
        reason = hopper_gemm_unavailable_reason(device)
        if reason is None and is_mps_active():
            reason = "under NVIDIA MPS, CTAs must not wait for each other"
        if reason is not None:
            raise ValueError(f"--deterministic cannot run on {device}: {reason}; omit it")
        self.is_deterministic = True

    def prepare_layer(self, layer: Layer) -> CudaLayer:
        """Converts a loaded layer for the kernels. Called once, at load. Raises ValueError for unsupported sizes."""
        width, device = layer.att_mix.shape[1], layer.att_mix.device
        check_sizes(width, layer.ffn_key.weight.shape[0])
        if device not in self.workspaces:
            self.prepare_device(device, width, layer.ffn_key.weight.shape[0])
        if isinstance(layer.ffn_value, CudaQuantValue) and layer.ffn_value.needs_transposed:
            self.workspaces[device].transposed_weight = transposed_buffer(layer.ffn_value.packed.qweight)
        return prepare_layer(layer, self.is_deterministic)

    def fits_draft_step(self, shape: ModelShape, device: torch.device) -> bool:
        """See MakesDraftSteps."""
        return draft_step.fits(shape, device)

    place_tokens = staticmethod(draft_step.place_tokens)
    fill_guess_table = staticmethod(draft_step.fill_guess_table)

    def make_draft_step(
        self, layers: Sequence[Layer], embedding: Tensor, ln_out: Norm, head: Linear, state: StateArena
    ) -> draft_step.DraftStep:
        """See MakesDraftSteps."""
        num_sms = torch.cuda.get_device_properties(embedding.device).multi_processor_count
        ours = cast(Sequence[CudaLayer], layers)
        return draft_step.DraftStep(ours, embedding, ln_out, head, state, num_sms)

    def prepare_device(self, device: torch.device, width: int, ffn: int) -> None:
        """Builds the kernels and the workspace.

        The workspace serves models up to this width and channel mix.
        """
        self.workspaces[device] = Workspace.build(device, width, ffn)
        library()
        if has_hopper_gemm(device):
            prepare_hopper_gemm(device)

    def project(
        self, layer: Layer, mixed: MixedInputs | DeferredMix, adapters: LayerAdapters | None = None
    ) -> Projections:
        """As naive; mixed [6, T, C] in the order r, k, v, w, a, g."""
        assert isinstance(layer, CudaLayer), "prepare_layer comes first"
        p = project(layer, mixed, lambda: self._side_streams(layer.low_in.device))
        if adapters is not None:
            assert isinstance(mixed, Tensor), "rows with adapters have fp16 inputs, not quantised ones"
            targets = (Target.RECEPTANCE, Target.KEY, Target.VALUE)
            adapters.add(*map(AdaptedLinear, targets, mixed[:3].unbind(), (p.r, p.k, p.v)))
        return p

    def _side_streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Returns the device's two side streams. They are made once, because cuBLAS keeps a workspace per stream."""
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]

    def time_mix(
        self, layer: Layer, p: Projections, v_first: Tensor | None, wkv: Tensor, inputs: StepInputs
    ) -> tuple[Tensor | QuantisedRows, Tensor]:
        """As naive: p [T, C] fp16 each, v_first [T, C] fp16, wkv [num_slots, H, 64, 64] fp16 or fp32.

        wkv may be [num_slots, H, 4224] uint8: int8 states with their scales (model/state.py). One kernel serves rows of
        one token, which come first. Another serves longer rows: in chunks, or token by token with the first one's bits:
        short ones, and all if steps are deterministic.
        A mixed step runs both. If all rows have one token, the first kernel may also compute the pending second
        low-rank products (`CudaProjections.low`). y is quantised (two-part) if all rows have one token and the output
        layer `takes_two_part_rows`.
        """
        width = p.r.shape[1]
        residual = layer.v_residual if v_first is not None else None
        rows = len(inputs.read_slots)
        num_single = inputs.single_rows if inputs.max_seqlen > 1 else rows
        two_parts = None
        output_layer = layer.output
        if num_single == len(p.r) and not has_adapters(inputs) and isinstance(output_layer, CudaQuantLinear):
            takes_two_parts = output_layer.takes_two_part_rows(num_single)
            two_parts = output_layer.empty_two_part_rows(num_single, width) if takes_two_parts else None
        y: Tensor | QuantisedRows = torch.empty_like(p.r) if two_parts is None else two_parts
        f32 = torch.float32
        args = WkvArgs(
            **{name: cuda_pointer(getattr(p, name)) for name in ("r", "w", "k", "v", "a", "g")},
            v_gate=cuda_pointer(p.v_gate) if residual else None,
            v_first=cuda_pointer(v_first) if residual else None,
            **{name: cuda_pointer(getattr(layer, name), f32) for name in ("w0", "a0", "k_k", "k_a", "r_k")},
            v0=cuda_pointer(residual.v0, f32) if residual else None,
            ln_weight=cuda_pointer(layer.ln_x.weight, f32),
            ln_bias=cuda_pointer(layer.ln_x.bias, f32),
            y=cuda_pointer(y) if isinstance(y, Tensor) else None,
            y_two_part=None if two_parts is None else cuda_pointer(two_parts.codes, two_parts.codes.dtype),
            state=slots_pointer(wkv, (torch.float16, f32, torch.uint8)),
            read_slots=cuda_pointer(inputs.read_slots, torch.int64),
            write_slots=cuda_pointer(inputs.write_slots, torch.int64),
            slot_stride=wkv.stride(0),
            heads=width // HEAD_SIZE,
        )
        outputs = y, p.v if v_first is None else v_first
        if isinstance(p, CudaProjections) and p.low is not None:
            assert isinstance(layer, CudaLayer), "prepare_layer comes first"
            up_args = p.low.up_args_for_wkv(layer) if num_single == len(p.r) else None
            if up_args is not None:
                args.rows = rows
                library().call("rwkv_wkv_few", ctypes.byref(args), ctypes.byref(up_args), wkv.element_size())
                return outputs
            p.finish()
        if num_single:
            args.rows = num_single
            library().call("rwkv_wkv_decode", ctypes.byref(args), wkv.element_size())
        if rows > num_single:
            args.rows, args.continuing = rows - num_single, inputs.continuing_rows
            args.cu_seqlens = cuda_pointer(inputs.cu_seqlens[num_single:], torch.int64)
            args.read_slots = cuda_pointer(inputs.read_slots[num_single:], torch.int64)
            args.write_slots = cuda_pointer(inputs.write_slots[num_single:], torch.int64)
            short_tokens = 1 if wkv.dtype is torch.uint8 else SHORT_TOKENS
            are_short = len(p.r) - num_single <= short_tokens * args.rows
            if self.is_deterministic or are_short:
                library().call("rwkv_wkv_sequence", ctypes.byref(args), wkv.element_size())
            else:
                library().call("rwkv_wkv_chunk", ctypes.byref(args), wkv.element_size(), len(p.r) - num_single)
        return outputs

    def output(self, layer: Layer, y: Tensor | QuantisedRows) -> Tensor | PartialSums:
        """As naive; y from `time_mix`."""
        if not isinstance(y, QuantisedRows):
            return layer.output(y)
        assert isinstance(layer.output, CudaQuantLinear), "quantised rows need quantised weights"
        return multiply_to_partials(layer.output, y)

    def add(self, x: Tensor, delta: Tensor | PartialSums | RowSums | ExactSums) -> Tensor:
        """As naive."""
        if isinstance(delta, ExactSums):
            return add_exact_sums(x, delta)
        if isinstance(delta, Tensor):
            return x + delta
        return add_sums(x, delta) if isinstance(delta, RowSums) else add_partial_sums(x, delta)

    def channel_mix(
        self,
        layer: Layer,
        x: Tensor | QuantisedRows | Codes | DeferredMix | SingleRowInput,
        adapters: LayerAdapters | None = None,
    ) -> Tensor | PartialSums | RowSums | ExactSums:
        """As naive, with more formats of x and of the result.

        x [T, C] is fp16 or quantised. The result is [T, C] fp16, split-K partials, one row's fixed-point sums, or exact
        sums. With few rows, only the rows of ffn.value are read whose input is not zero.
        """
        assert isinstance(layer, CudaLayer), "prepare_layer comes first"
        return channel_mix(layer, x, adapters, self.workspaces)

    def norm_rows(self, x: Tensor, rows: Tensor, norm: Norm) -> Tensor:
        """LayerNorm of rows [R] of x [T, C] -> [R, C] fp16.

        rows: int64
        """
        out = torch.empty(len(rows), x.shape[1], dtype=x.dtype, device=x.device)
        weight, bias = cuda_pointer(norm.weight, torch.float32), cuda_pointer(norm.bias, torch.float32)
        library().call(
            "rwkv_norm_rows",
            cuda_pointer(x),
            cuda_pointer(rows, torch.int64),
            weight,
            bias,
            cuda_pointer(out),
            len(rows),
            x.shape[1],
        )
        return out


def check_sizes(width: int, ffn: int) -> None:
    """Checks a model's sizes.

    Raises ValueError with the allowed sizes if the kernels do not take a model's.
    """
    if width % HEAD_SIZE or width > MAX_WIDTH or ffn % FFN_STEP or ffn > MAX_FFN:
        raise ValueError(
            f"the cuda kernels take widths of a multiple of {HEAD_SIZE} up to {MAX_WIDTH} and a channel mix of a "
            f"multiple of {FFN_STEP} up to {MAX_FFN}, not {width} and {ffn}; use --kernels naive"
        )
