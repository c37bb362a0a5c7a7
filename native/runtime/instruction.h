// What a tape is made of. Every worker of the pool runs every instruction; between two of them is a barrier.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/table.h"
#include "runtime/pool.h"
#include "runtime/step.h"

namespace ridgeline {

inline constexpr int64_t kCacheLine = 64;

// Memory that starts at a multiple of 64 bytes and only grows; new memory is zero.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
    other.bytes_ = 0;
  }
  AlignedBuffer& operator=(AlignedBuffer&&) = delete;

  // Forgets the contents where it has to grow. Throws std::bad_alloc.
  void reserve(int64_t bytes);
  int64_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

// How large buffers have to be, said before they are: what several users need of one is its largest need.
class Workspace {
 public:
  void need(const AlignedBuffer& buffer, int64_t bytes);
  int64_t bytes() const;

 private:
  std::unordered_map<const AlignedBuffer*, int64_t> bytes_;
};

enum class Rows : uint8_t { tokens, logits };

// Float32 rows between instructions: one per token of the step, or one per row that needs logits. A slice is columns
// of another buffer: it may be read wherever a buffer may, and written entry by entry but not by matrix products, which
// write whole panels.
struct Buffer {
  Rows rows;
  int64_t width;
  int64_t stride;  // of a whole buffer: width rounded up to 32
  AlignedBuffer memory{};
  const Buffer* slice_of = nullptr;  // a whole buffer
  int64_t offset = 0;

  float* data() const { return slice_of ? slice_of->memory.as<float>() + offset : memory.as<float>(); }
  float* row(int64_t index) const { return data() + index * stride; }
};

// One worker's view of the step that runs.
struct Worker {
  const KernelTable& kernels;
  Pool& pool;
  const Step& step;
  int index;
  int count;
  void* scratch;  // of this worker alone; tape.h: need_scratch
  void* first_scratch;  // worker 0's, which it may lend
  int arrivals = 1;  // at a barrier, with those of threads of the pool that are no workers yet

  // Returns once every worker has called it.
  void barrier() const { pool.barrier(arrivals); }

  // [begin, end) of this worker's even share of `total`, in whole multiples of `unit`.
  struct Share {
    int64_t begin, end;
  };
  Share share(int64_t total, int64_t unit = 1) const {
    const int64_t units = (total + unit - 1) / unit;
    const int64_t begin = units * index / count * unit, end = units * (index + 1) / count * unit;
    return {begin < total ? begin : total, end < total ? end : total};
  }
};

// Hands out chunks of a range to workers: each takes its own contiguous share from the front, so that memory is read in
// streams, then helps the others from the end of theirs.
class Claims {
 public:
  // Called by one thread before the step.
  void reset(int64_t total, int64_t chunk, int workers);
  // The next chunk for `worker`; false when nothing is left.
  bool next(int worker, int64_t& begin, int64_t& end);
  // Where the chunk begins that `next` would give the worker now of its own share, -1 where that is used up.
  int64_t peek(int worker) const;

 private:
  // Chunk numbers [begin, end) that are left, begin in the low half.
  struct alignas(kCacheLine) Share {
    std::atomic<uint64_t> left{0};
  };
  // Takes the first chunk of a share, or the last one; -1 where none is left.
  static int64_t take(Share& share, bool first);

  static constexpr int kFew = 2;  // workers whose shares lie within the claims, where they are fetched with what has them
  Share few_[kFew];
  std::unique_ptr<Share[]> many_;
  Share* shares_ = few_;
  int workers_ = 0;
  int64_t total_ = 0, chunk_ = 1;
};

// Bytes that inputs of up to `rows` rows take, as the kernels read them.
inline int64_t most_input_bytes(const KernelTable& kernels, const Matrix& matrix, int64_t rows) {
  return kernels.linear.input_bytes(matrix, rows) + kInputSlack;
}

class Instruction {
 public:
  virtual ~Instruction() = default;
  // Says what `prepare` reserves at most for steps within `limits`, of memory that is not the tape's own.
  virtual void measure(const KernelTable&, const StepLimits&, int /*workers*/, Workspace&) const {}
  // Called by one thread before the workers start: sizes buffers, resets claims, plans.
  virtual void prepare(const KernelTable& kernels, const Step& step, int workers) = 0;
  virtual void run(const Worker& worker) = 0;
};

}  // namespace ridgeline
