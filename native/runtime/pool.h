// A persistent team of threads that runs one function on all of them. The caller is worker 0, so a pool of n threads
// never has more than n runnable ones. Workers wait for the next call spinning for a moment, then parked in the kernel:
// an idle pool uses no CPU. A process made by fork() has none of the threads, and can only let go of the pool.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ridgeline {

class Pool {
 public:
  // Throws std::invalid_argument for num_threads outside 1..4096, std::runtime_error where the system gives fewer.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return num_threads_; }

  // Calls body(context, worker) once per worker and returns when all are done. Calls from several threads take turns.
  // Throws std::runtime_error in a process that was forked from the pool's.
  void run(void (*body)(void* context, int worker), void* context);

  // Calls body(context, worker) once per worker but worker 0, who is the caller of `finish`, or of any other method that
  // runs something before it. Only with two threads or more; within it, see `barrier`. Throws as `run` does.
  void start(void (*body)(void* context, int worker), void* context);

  // Calls body(context, 0) of what was started, if anything was, and returns when all are done.
  void finish();

  // Calls body(context, 0) and wakes nobody: within it the caller is the only worker.
  void run_alone(void (*body)(void* context, int worker), void* context);

  // Within `body`: returns once every worker has called it. What they wrote before is visible after. A worker may count
  // for others who do not come, as one whose call counts `arrivals`.
  void barrier(int arrivals = 1);

  // Spins, and then sleeps, until `value` is no longer `old`.
  static int64_t wait_while(const std::atomic<int64_t>& value, int64_t old);

  // Seconds so far in which workers waited in the kernel for one that came late to a barrier.
  double held_up_s() const { return num_threads_ == 1 ? 0 : (double)held_up_ns_.load() * 1e-9 / (num_threads_ - 1); }

 private:
  void require_own_process() const;
  void call(void (*body)(void*, int), void* context);
  void finish_started();
  void work(int worker);
  void note_core();
  // Goes to a core that no worker has, where another is on this one. The system may wake two on one core while others run
  // for a moment, and leaves them there: they take turns, and each turn begins when the other has waited in vain.
  void leave_shared_core();
  void stop();
  bool is_orphan() const;

  const int num_threads_;
  const pid_t process_;
  std::mutex turn_;
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool alone_ = false;  // changed only while the others wait for a call
  bool started_ = false;  // whether the others have begun what worker 0 has not
  alignas(64) std::atomic<uint32_t> call_{0};      // changes when there is something to run
  alignas(64) std::atomic<uint64_t> arrived_{0};   // arrivals at all barriers so far
  alignas(64) std::atomic<uint32_t> phase_{0};     // changes when all have arrived and some wait for it to change
  std::atomic<uint32_t> parked_{0};                // workers that have stopped spinning at a barrier
  alignas(64) std::atomic<int64_t> held_up_ns_{0};  // of all workers together
  alignas(64) std::atomic<bool> stop_{false};
  std::unique_ptr<std::vector<std::thread>> threads_;
  std::unique_ptr<std::atomic<int>[]> cores_;  // of each worker, when it came to a barrier last
};

}  // namespace ridgeline
