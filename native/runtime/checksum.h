// A fast checksum that finds damaged or truncated data; not a defence against somebody who forges it.
#pragma once

#include <cstdint>
#include <vector>

namespace ridgeline {

struct Bytes {
  const uint8_t* data;
  int64_t num_bytes;
};

uint64_t checksum(Bytes part);
std::vector<uint64_t> checksums(const std::vector<Bytes>& parts, int num_threads);

}  // namespace ridgeline
