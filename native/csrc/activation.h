// What a linear map applies to its outputs. Mirrored by rwkv_batch/kernels/activation.py.
#pragma once

enum Activation { NONE = 0, TANH = 1, SIGMOID = 2, RELU_SQUARED = 3, SIGNED_SQUARE = 4 };
