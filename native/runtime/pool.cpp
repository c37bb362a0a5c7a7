#include "runtime/pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ridgeline {
namespace {

// Waiting longer than this is not waiting for a step: park. A decode step follows the last one within some 100 us.
constexpr int64_t kIdleSpinNs = 400'000;
// Within a step a worker is late only when the machine is busy with something else: give it the core early.
constexpr int64_t kBarrierSpinNs = 100'000;
constexpr int kPausesPerLook = 64;
constexpr int kMaxThreads = 4096;
// So many wait at a barrier for the count of those that have come, which takes one transfer between cores less than
// waiting for the last one's word; more of them would slow down those that are coming.
constexpr int kFewThreads = 4;

thread_local int this_worker = 0;  // in its pool; whoever calls one is its first

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Whether done() came true before `spin_ns` were over.
template <class Done>
bool spin_until(const Done& done, int64_t spin_ns) {
  for (int i = 0; i < kPausesPerLook; i++) {
    if (done()) return true;
    pause();
  }
  const int64_t deadline = now_ns() + spin_ns;
  do {
    for (int i = 0; i < kPausesPerLook; i++) {
      if (done()) return true;
      pause();
    }
  } while (now_ns() < deadline);
  return false;
}

// Flushes subnormal numbers to zero, as the matrix units do, so that all kernels agree and none is slow; restores on
// leaving what the caller had.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" ::"r"(saved_ | 1 << 24));
  }
  ~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushSubnormals() {}
#endif
};

}  // namespace

Pool::Pool(int num_threads)
    : num_threads_(num_threads), process_(getpid()), threads_(std::make_unique<std::vector<std::thread>>()),
      cores_(std::make_unique<std::atomic<int>[]>((size_t)std::clamp(num_threads, 1, kMaxThreads))) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    throw std::invalid_argument("a thread pool has 1 to " + std::to_string(kMaxThreads) + " threads, not " +
                                std::to_string(num_threads));
  try {
    for (int worker = 1; worker < num_threads; worker++) threads_->emplace_back([this, worker] { work(worker); });
  } catch (const std::system_error& error) {
    stop();
    throw std::runtime_error("the system gives this process " + std::to_string(threads_->size() + 1) + " of " +
                             std::to_string(num_threads) + " threads (" + error.what() + "): ask for fewer");
  }
}

Pool::~Pool() {
  if (is_orphan())
    (void)threads_.release();  // to join or detach threads of another process is undefined
  else
    stop();
}

void Pool::stop() {
  stop_.store(true);
  call_.fetch_add(1);
  call_.notify_all();
  for (std::thread& thread : *threads_) thread.join();
}

bool Pool::is_orphan() const { return num_threads_ > 1 && getpid() != process_; }

void Pool::require_own_process() const {
  if (is_orphan())
    throw std::runtime_error("the thread pool stayed in the process that this one was forked from: build the engine "
                             "after the fork, or start processes by spawn");
}

void Pool::run_alone(void (*body)(void*, int), void* context) {
  require_own_process();
  const std::lock_guard lock(turn_);
  const FlushSubnormals flush;
  finish_started();
  alone_ = true;
  body(context, 0);
  alone_ = false;
}

void Pool::run(void (*body)(void*, int), void* context) {
  require_own_process();
  const std::lock_guard lock(turn_);
  const FlushSubnormals flush;
  finish_started();
  call(body, context);
  body(context, 0);
  barrier();
}

void Pool::start(void (*body)(void*, int), void* context) {
  require_own_process();
  const std::lock_guard lock(turn_);
  finish_started();
  call(body, context);
  started_ = true;
}

void Pool::finish() {
  require_own_process();
  const std::lock_guard lock(turn_);
  finish_started();
}

void Pool::finish_started() {
  if (!started_) return;
  const FlushSubnormals flush;
  body_(context_, 0);
  barrier();
  started_ = false;
}

void Pool::call(void (*body)(void*, int), void* context) {
  body_ = body;
  context_ = context;
  if (num_threads_ == 1) return;
  note_core();
  call_.fetch_add(1);
  call_.notify_all();
}

int64_t Pool::wait_while(const std::atomic<int64_t>& value, int64_t old) {
  if (!spin_until([&] { return value.load() != old; }, kBarrierSpinNs)) value.wait(old);
  return value.load();
}

void Pool::barrier(int arrivals) {
  if (num_threads_ == 1 || alone_) return;
  note_core();
  const bool few = num_threads_ <= kFewThreads;
  const uint32_t phase = few ? 0 : phase_.load();
  const uint64_t threads = (uint64_t)num_threads_, arrival = arrived_.fetch_add((uint64_t)arrivals);
  const uint64_t all = (arrival / threads + 1) * threads;
  if (arrival + (uint64_t)arrivals == all) {
    if (few && parked_.load() == 0) return;
    phase_.fetch_add(1);
    phase_.notify_all();
    return;
  }
  // A new phase alone may be the word of the barrier before, which workers that had parked leave without it.
  const auto passed = [&] { return (few || phase_.load() != phase) && arrived_.load() >= all; };
  if (spin_until(passed, kBarrierSpinNs)) return;
  const int64_t start = now_ns();
  leave_shared_core();
  parked_.fetch_add(1);
  for (;;) {
    const uint32_t seen = phase_.load();
    if (arrived_.load() >= all) break;
    phase_.wait(seen);
  }
  parked_.fetch_sub(1);
  held_up_ns_.fetch_add(now_ns() - start);
}

void Pool::note_core() {
#if defined(__linux__)
  std::atomic<int>& noted = cores_[this_worker];
  if (const int core = sched_getcpu(); noted.load(std::memory_order_relaxed) != core)
    noted.store(core, std::memory_order_relaxed);
#endif
}

void Pool::leave_shared_core() {
#if defined(__linux__)
  note_core();
  const auto workers_on = [&](int core) { return std::count(&cores_[0], &cores_[0] + num_threads_, core); };
  cpu_set_t usable, own;
  if (workers_on(cores_[this_worker]) == 1 || sched_getaffinity(0, sizeof usable, &usable)) return;
  for (int core = 0; core < CPU_SETSIZE; core++) {
    if (!CPU_ISSET(core, &usable) || workers_on(core)) continue;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    if (!sched_setaffinity(0, sizeof own, &own)) sched_setaffinity(0, sizeof usable, &usable);
    return note_core();
  }
#endif
}

void Pool::work(int worker) {
  const FlushSubnormals flush;
  this_worker = worker;
  uint32_t seen = 0;
  while (true) {
    if (!spin_until([&] { return call_.load() != seen; }, kIdleSpinNs))
      while (call_.load() == seen) call_.wait(seen);
    seen++;
    if (stop_.load()) return;
    leave_shared_core();
    body_(context_, worker);
    barrier();
  }
}

}  // namespace ridgeline
