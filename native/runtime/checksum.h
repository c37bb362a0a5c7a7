// A fast checksum that finds damaged or truncated data; not a defence against somebody who forges it.
#pragma once

#include <cstdint>

namespace ridgeline {

uint64_t checksum(const uint8_t* data, int64_t num_bytes);

}  // namespace ridgeline
