// Measures the ceilings of this machine with the probe kernels, in threads of their own.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "runtime/isa.h"
#include "runtime/pool.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

using Clock = std::chrono::steady_clock;
using Readings = std::vector<double>;

constexpr int64_t kHugePage = 2 << 20, kMinBytesTimed = 64 << 20, kMaxBytes = 1LL << 46;
constexpr int kMaxThreads = 1024;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// Anonymous memory in whole huge pages, where the kernel gives them; unmapped at the end.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : mapped_bytes_(bytes + kHugePage) {
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    data = (uint8_t*)(((uintptr_t)mapped_ + kHugePage - 1) / kHugePage * kHugePage);
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);  // advice: small pages serve too
#endif
  }
  ~Buffer() { munmap(mapped_, mapped_bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data;

 private:
  void* mapped_;
  int64_t mapped_bytes_;
};

// Runs work(worker) in all threads of a pool.
void in_workers(Pool& pool, const std::function<void(int)>& work) {
  pool.run([](void* what, int worker) { (*static_cast<const std::function<void(int)>*>(what))(worker); }, (void*)&work);
}

// Bytes per second of each repeat. Every thread reads a contiguous share that it touched first; a repeat reads a small
// buffer several times.
Readings read_bandwidth(const std::string& level, int num_threads, int64_t buffer_bytes, int repeats) {
  require(1 <= num_threads && num_threads <= kMaxThreads, "num_threads must be from 1 to 1024");
  require(repeats >= 1, "repeats must be at least 1");
  const int64_t share = buffer_bytes / num_threads / 64 * 64;
  require(share > 0 && buffer_bytes < kMaxBytes, "buffer_bytes must be from 64 for each thread to 2^46");
  const ProbeKernels& kernels = kernels_of(level).probe;
  const int64_t read_bytes = share * num_threads, passes = (kMinBytesTimed + read_bytes - 1) / read_bytes;

  const Buffer buffer(read_bytes);
  std::vector<Clock::time_point> stamps;
  stamps.reserve(repeats + 2);
  std::atomic<uint64_t> sink{0};
  Pool pool(num_threads);
  in_workers(pool, [&](int worker) {
    uint8_t* const mine = buffer.data + worker * share;
    for (int64_t at = 0; at < share; at += 64) mine[at] = (uint8_t)worker;
    for (int repeat = -1; repeat <= repeats; repeat++) {  // the first one warms up
      for (int64_t pass = 0; repeat >= 0 && pass < passes; pass++) sink ^= kernels.read(mine, share);
      pool.barrier();
      if (worker == 0) stamps.push_back(Clock::now());
    }
  });
  Readings bytes_per_s;
  for (size_t i = 2; i < stamps.size(); i++)
    bytes_per_s.push_back((double)(read_bytes * passes) / seconds_between(stamps[i - 1], stamps[i]));
  return bytes_per_s;
}

// Operations per second of one thread that loops for about `seconds`.
double rate(const std::function<double(int64_t)>& loop, double seconds) {
  int64_t rounds = 1;
  double operations = 0, elapsed = 0;
  const Clock::time_point start = Clock::now();
  while (elapsed < seconds) {
    operations += loop(rounds);
    elapsed = seconds_between(start, Clock::now());
    if (elapsed < seconds / 8) rounds *= 2;
  }
  return operations / elapsed;
}

// Operations per second of each repeat, all threads together.
Readings peak(const std::string& level, const std::string& kind, int num_threads, double seconds, int repeats) {
  require(1 <= num_threads && num_threads <= kMaxThreads, "num_threads must be from 1 to 1024");
  require(repeats >= 1, "repeats must be at least 1");
  require(0 < seconds && seconds <= 60, "seconds must be above 0, and at most 60");
  const char* names[] = {"f32", "bf16", "int16", "int8"};  // in the order of InputKind
  const ProbeKernels& kernels = kernels_of(level).probe;
  int index = 0;
  while (index < 4 && kind != names[index]) index++;
  require(index < 4 || kind == "int4", "kind must be f32, bf16, int16, int8 or int4");
  const bool nibbles = index == 4 && kernels.peak_int4;
  const InputKind inputs = index == 4 ? InputKind::int8 : (InputKind)index;
  const auto loop = [&](int64_t rounds) { return nibbles ? kernels.peak_int4(rounds) : kernels.peak(inputs, rounds); };

  std::vector<Readings> rates(repeats, Readings(num_threads));
  Pool pool(num_threads);
  in_workers(pool, [&](int worker) {
    for (Readings& of_threads : rates) {
      pool.barrier();
      of_threads[worker] = rate(loop, seconds);
    }
  });
  Readings totals;
  for (const Readings& of_threads : rates) {
    double total = 0;
    for (const double one : of_threads) total += one;
    totals.push_back(total);
  }
  return totals;
}

// Makes the compiler forget what it knows of an integer, at no cost.
inline void forget(uint64_t& value) { __asm__ volatile("" : "+r"(value)); }

constexpr int64_t kScalarRounds = 10'000;  // some 20 to 100 us a window

// Additions one after the other: one a cycle, and so the clock.
double chained_seconds() {
  uint64_t sum = 0;
  const Clock::time_point start = Clock::now();
  for (int64_t round = 0; round < kScalarRounds; round++)
    for (int i = 0; i < 8; i++) sum += 3, forget(sum);
  return seconds_between(start, Clock::now());
}

// As many additions that do not depend on one another.
double independent_seconds() {
  uint64_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
  const Clock::time_point start = Clock::now();
  for (int64_t round = 0; round < kScalarRounds; round++) {
    a += 3, b += 3, c += 3, d += 3, e += 3, f += 3, g += 3, h += 3;
    forget(a), forget(b), forget(c), forget(d), forget(e), forget(f), forget(g), forget(h);
  }
  return seconds_between(start, Clock::now());
}

Readings scalar_per_cycle(int windows) {
  require(1 <= windows && windows <= 1'000'000, "windows must be from 1 to 1000000");
  Readings ratios;
  for (int window = 0; window < windows; window++) {
    const double chained = chained_seconds();
    ratios.push_back(chained / independent_seconds());
  }
  return ratios;
}

uint64_t read_words(const std::string& level, const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig>& bytes) {
  return kernels_of(level).probe.read(bytes.data(), (int64_t)bytes.shape(0));
}

}  // namespace

void bind_probe(nb::module_& module) {
  using namespace nb::literals;
  module.def("read_bandwidth", &read_bandwidth, nb::call_guard<nb::gil_scoped_release>(), "level"_a, "num_threads"_a,
             "buffer_bytes"_a, "repeats"_a, "Bytes per second of each of `repeats` reads of a buffer by all threads.");
  module.def("peak", &peak, nb::call_guard<nb::gil_scoped_release>(), "level"_a, "kind"_a, "num_threads"_a,
             "seconds"_a, "repeats"_a,
             "Operations per second (a multiply-add is two) of each of `repeats` register-only loops of about "
             "`seconds` in all threads; `kind` is f32, bf16, int16, int8 or int4 (8-bit inputs by 4-bit weights).");
  module.def("scalar_per_cycle", &scalar_per_cycle, nb::call_guard<nb::gil_scoped_release>(), "windows"_a,
             "Independent additions per cycle of this thread's core, in each of so many windows of some 50 us.");
  module.def("read_words", &read_words, "level"_a, "bytes"_a.noconvert(),
             "The exclusive or of the 64-bit words of `bytes`: what `read_bandwidth` computes.");
}

}  // namespace ridgeline
