"""The backend for NVIDIA GPUs: launches of the kernels in csrc/, and the choice of kernel by row count.

* `ops.py`: a layer's pieces; `shift_mix.py`, `input_projections.py`, `fused_input_projections.py`, `channel_mix.py`
* `layer.py`, `linear.py`, `quant_linear.py`: a loaded layer; `workspace.py`: scratch memory
* `hopper_gemm*.py`, `hopper_quantised_launch.py`, `skinny_quant.py`: GEMMs
* `quantised_gemm.py`: chooses the GEMM for quantised weights
* `packed_weights.py`: quantised weights, cuBLAS
* `quantised_rows.py`: quantised rows and weights, partial sums; `draft_step.py`: a small model's step in one launch
* `w8a8/`: int8 weights times 8-bit inputs
* `adapters.py`: an adapter per row; `library.py`: the compiled kernels
"""
