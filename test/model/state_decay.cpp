// A token that only multiplies a head's state by `decay`: what a state's format does to exact fp32 products.
#include "state.h"

template <class State>
static void decay_with(const void* from, void* to, float decay) {
  Token token = {};
  for (float& one : token.decay) one = decay;
  float y[HEAD];
  State(from).advance_to(to, token, y);
}

EXPORT void decay_fp16(const void* from, void* to, float decay) { decay_with<NumbersState<Half>>(from, to, decay); }
EXPORT void decay_int8(const void* from, void* to, float decay) { decay_with<Int8State>(from, to, decay); }
