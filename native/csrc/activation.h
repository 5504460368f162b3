// Activation of a linear layer's outputs. Same values as rwkv_batch/kernels/activation.py.
#pragma once

enum Activation { NONE = 0, TANH = 1, SIGMOID = 2, RELU_SQUARED = 3, SIGNED_SQUARE = 4 };
