"""The backend for NVIDIA GPUs: what each kernel of csrc/ is given, and which of them multiplies how many rows.

* `ops.py`: the pieces of a layer, of which `shift_mix.py` is the first and `channel_mix.py` the last; `workspace.py`:
  the memory between them
* `layer.py`, `linear.py`, `quant_linear.py`: what they are made of, as loaded
* `input_projections.py`, `fused_input_projections.py`: r, k, v and the low ranks of a time mix
* `hopper_gemm.py`, `hopper_gemm_weight_only.py`, `skinny_quant.py`, `cublas_fp8.py`: products; `hopper_gemm_fp8.py` and `hopper_gemm_int8.py`, which share
  `hopper_quantised_launch.py`: those of rows in codes; `quantised_gemm.py` chooses
* `packed_weights.py`, `quantised_weights.py`: small weights; `quantised_rows.py`: rows in codes, or in shares to be added up
* `adapters.py`: an adapter for each row; `library.py`: the compiled kernels, bound and checked
"""
