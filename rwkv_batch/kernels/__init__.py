"""The fused pieces of a layer, by backend: naive (plain torch, the truth), cpu (C++), cuda."""
