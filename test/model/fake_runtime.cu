// What the test of launches asks of fake_runtime.h.
#define FAKE_API extern "C" __attribute__((visibility("default")))

// The card that the next calls find, under a number of its own: sources remember what they asked a card.
FAKE_API void fake_card(int number, int major, int processors, int of_block, int of_processor, int kept) {
  fake::current = number;
  fake::cards[number] = {major, processors, of_block, of_processor, kept};
  fake::static_shared.clear();
}

FAKE_API void fake_static_shared(const char* kernel, int bytes) { fake::static_shared[kernel] = bytes; }

// Moves up to `room` launches to `out`; how many there were.
FAKE_API int fake_take(fake::Record* out, int room) {
  const int count = static_cast<int>(fake::records.size());
  for (int i = 0; i < count && i < room; ++i) out[i] = fake::records[i];
  fake::records.clear();
  return count;
}
