// What CPUs disagree about: how far ahead a kernel fetches and how its blocks are cut. Every matrix carries a Tuning; the
// values to choose from are the table in runtime/tuning.cpp.
#pragma once

#include <cstdint>

namespace ridgeline {

// Integer weights give the same bits under every tuning. With bfloat16 weights the bits depend on `float32` alone.
struct Tuning {
  int32_t ahead = 0;       // bytes by which a single block of rows fetches its weights; 0: as the hardware does
  uint8_t panels = 1;      // that one or two rows go through at once: 1, 2 or 4
  uint8_t block_rows = 0;  // that go through a panel together; 0: as many as the level is made for
  // Products of four and more rows read their inputs from memory, one instruction and one load each: cores that issue few
  // instructions gain, cores whose products keep pace with their loads lose. Otherwise a register holds them.
  bool from_memory = true;
  bool turns = true;       // blocks of 5 to 64 rows take turns at a group of inputs, not at a whole panel
  bool past_l2 = false;    // single blocks of rows fetch weights past the second-level cache, which keeps other values
  bool float32 = false;    // products of bfloat16 in float32, also where the level has an instruction for pairs
};

}  // namespace ridgeline
