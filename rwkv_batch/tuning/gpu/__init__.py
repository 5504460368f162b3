"""The training layer on GPUs: Triton kernels around the matrix products. `tuning.model` has the formulas."""
