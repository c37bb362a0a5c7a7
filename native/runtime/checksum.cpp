#include "runtime/checksum.h"

#include <atomic>
#include <cstring>
#include <thread>

namespace ridgeline {
namespace {

constexpr int kLanes = 8;
constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15u;  // odd: multiplying loses nothing

uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * kMultiplier;
  return state ^ (state >> 32);
}

}  // namespace

// Eight independent chains, so that the multiplications overlap; then one over the chains, the rest and the length.
uint64_t checksum(Bytes part) {
  const auto [data, num_bytes] = part;
  uint64_t chain[kLanes];
  for (int lane = 0; lane < kLanes; lane++) chain[lane] = (uint64_t)lane + 1;
  int64_t at = 0;
  for (; at + 8 * kLanes <= num_bytes; at += 8 * kLanes) {
    uint64_t words[kLanes];
    std::memcpy(words, data + at, sizeof words);
    for (int lane = 0; lane < kLanes; lane++) chain[lane] = mix(chain[lane], words[lane]);
  }
  uint64_t state = (uint64_t)num_bytes;
  for (int lane = 0; lane < kLanes; lane++) state = mix(state, chain[lane]);
  for (; at < num_bytes; at++) state = mix(state, data[at]);
  return state;
}

std::vector<uint64_t> checksums(const std::vector<Bytes>& parts, int num_threads) {
  std::vector<uint64_t> sums(parts.size());
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i = next++; i < parts.size(); i = next++) sums[i] = checksum(parts[i]);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; i++) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return sums;
}

}  // namespace ridgeline
