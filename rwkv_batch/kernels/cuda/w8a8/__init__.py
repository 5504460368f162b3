"""W8A8 GEMMs: int8 weights times 8-bit inputs, with exact sums.

* `products.py`: weights on a device, quantised inputs, launches
* `row.py`: launches for one row
* `plans.py`: the tile of a launch; `launch_table.json`: measured ones, written by `bench/w8a8_plans.py`
"""
