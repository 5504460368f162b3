"""What this machine can do, and how C++ and CUDA sources become shared libraries. Nothing happens at import."""
