"""The backend for CPUs: bindings and memory of the C++ kernels in csrc/.

* `ops.py`: a stage's layers in one call; `linear.py`: packed matrices; `memory.py`: their memory
* `adapters.py`: an adapter per row; `library.py`: the C ABI
"""
