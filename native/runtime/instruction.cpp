#include "runtime/instruction.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ridgeline {
namespace {

constexpr int64_t kHugePage = 2 << 20;

// Rows of wide buffers lie pages apart, so that walking down a column costs an address translation a row; huge pages,
// where the kernel gives them, save that.
void* allocate(int64_t bytes) {
  if (bytes < kHugePage) return std::aligned_alloc(kCacheLine, (size_t)bytes);
  void* data = nullptr;
  if (posix_memalign(&data, kHugePage, (size_t)bytes) != 0) return nullptr;
#if defined(MADV_HUGEPAGE)
  madvise(data, (size_t)(bytes / kHugePage * kHugePage), MADV_HUGEPAGE);  // advice: small pages serve too
#endif
  return data;
}

}  // namespace

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

void AlignedBuffer::reserve(int64_t bytes) {
  if (bytes <= bytes_) return;
  const int64_t rounded = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  std::free(data_);
  bytes_ = 0;
  data_ = static_cast<uint8_t*>(allocate(rounded));
  if (!data_) throw std::bad_alloc();
  bytes_ = rounded;
  std::memset(data_, 0, (size_t)rounded);
}

void Workspace::need(const AlignedBuffer& buffer, int64_t bytes) {
  int64_t& most = bytes_[&buffer];
  most = std::max(most, (bytes + kCacheLine - 1) / kCacheLine * kCacheLine);
}

int64_t Workspace::bytes() const {
  int64_t total = 0;
  for (const auto& [buffer, bytes] : bytes_) total += bytes;
  return total;
}

void Claims::reset(int64_t total, int64_t chunk, int workers) {
  if (workers != workers_) {
    many_ = workers > kFew ? std::make_unique<Share[]>((size_t)workers) : nullptr;
    shares_ = many_ ? many_.get() : few_;
    workers_ = workers;
  }
  total_ = total;
  chunk_ = chunk;
  const uint64_t chunks = (uint64_t)((total + chunk - 1) / chunk), count = (uint64_t)workers;
  for (uint64_t w = 0; w < count; w++)
    shares_[w].left.store((chunks * (w + 1) / count) << 32 | chunks * w / count, std::memory_order_relaxed);
}

int64_t Claims::take(Share& share, bool first) {
  uint64_t left = share.left.load(std::memory_order_relaxed);
  while (true) {
    const uint64_t begin = left & 0xffffffffu, end = left >> 32;
    if (begin >= end) return -1;
    const uint64_t rest = first ? end << 32 | (begin + 1) : (end - 1) << 32 | begin;
    if (share.left.compare_exchange_weak(left, rest, std::memory_order_relaxed))
      return (int64_t)(first ? begin : end - 1);
  }
}

int64_t Claims::peek(int worker) const {
  const uint64_t left = shares_[worker].left.load(std::memory_order_relaxed);
  const uint64_t begin = left & 0xffffffffu, end = left >> 32;
  return begin < end ? (int64_t)begin * chunk_ : -1;
}

bool Claims::next(int worker, int64_t& begin, int64_t& end) {
  int64_t chunk = take(shares_[worker], true);
  for (int i = 1; i < workers_ && chunk < 0; i++) chunk = take(shares_[(worker + i) % workers_], false);
  if (chunk < 0) return false;
  begin = chunk * chunk_;
  end = begin + chunk_ < total_ ? begin + chunk_ : total_;
  return true;
}

}  // namespace ridgeline
