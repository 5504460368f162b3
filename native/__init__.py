"""The machine's abilities, and builds of C++ and CUDA sources. Importing has no side effects."""
