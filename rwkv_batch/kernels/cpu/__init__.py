"""The backend for CPUs: C++ of csrc/, and what it is given.

* `ops.py`: a stage's layers in one call; `linear.py`: the maps that they are made of, as loaded
* `adapters.py`: an adapter for each row; `memory.py`: where packed matrices lie
* `library.py`: the compiled library, its arguments, bound and checked
"""
