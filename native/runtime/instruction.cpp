#include "runtime/instruction.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace ridgeline {

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

void AlignedBuffer::reserve(int64_t bytes) {
  if (bytes <= bytes_) return;
  const int64_t rounded = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  std::free(data_);
  bytes_ = 0;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(kCacheLine, (size_t)rounded));
  if (!data_) throw std::bad_alloc();
  bytes_ = rounded;
  std::memset(data_, 0, (size_t)rounded);
}

void Claims::reset(int64_t total, int64_t chunk, int workers) {
  if (workers != workers_) {
    shares_ = std::make_unique<Share[]>((size_t)workers);
    workers_ = workers;
  }
  chunk_ = chunk;
  const int64_t chunks = (total + chunk - 1) / chunk;
  for (int w = 0; w < workers; w++) {
    const int64_t end = chunks * (w + 1) / workers * chunk;
    shares_[(size_t)w].next.store(chunks * w / workers * chunk, std::memory_order_relaxed);
    shares_[(size_t)w].end = end < total ? end : total;
  }
}

bool Claims::next(int worker, int64_t& begin, int64_t& end) {
  for (int i = 0; i < workers_; i++) {
    Share& share = shares_[(size_t)((worker + i) % workers_)];
    if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
    begin = share.next.fetch_add(chunk_, std::memory_order_relaxed);
    if (begin >= share.end) continue;
    end = begin + chunk_ < share.end ? begin + chunk_ : share.end;
    return true;
  }
  return false;
}

}  // namespace ridgeline
