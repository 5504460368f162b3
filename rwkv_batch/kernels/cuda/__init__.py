"""The backend for NVIDIA GPUs: what each kernel of csrc/ is given, and which of them multiplies how many rows.

* `ops.py`: the pieces of a layer, of which `shift_mix.py` is the first and `channel_mix.py` the last; `workspace.py`:
  the memory between them
* `layer.py`, `linear.py`, `quant_linear.py`: what they are made of, as loaded
* `entrance.py`, `wide_entrance.py`: r, k, v and the low ranks of a time mix
* `wide.py`, `wide_codes.py`, `few_rows.py`, `cublas_fp8.py`: products; `wide_fp8.py` and `wide_int8.py`, which share
  `coded_launch.py`: those of rows in codes; `products.py` chooses
* `packed_codes.py`, `coded_weights.py`: small weights; `row_codes.py`: rows in codes, or in shares to be added up
* `adapters.py`: an adapter for each row; `library.py`: the compiled kernels, bound and checked
"""
