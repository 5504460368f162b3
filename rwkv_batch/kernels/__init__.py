"""A layer's fused operations by backend: naive (plain torch, the definition), cpu (C++), cuda."""
