// Whether steps of one size go faster on one worker than on all of them. Between two instructions all wait for the last:
// where the system gives a worker's core to another process, that takes a time slice, many times what a small step does.
// One worker waits for nobody. Learnt from the steps' own times; the results are the same bits either way.
#pragma once

#include <cstdint>
#include <limits>

namespace ridgeline {

class Team {
 public:
  // How the next step is run.
  bool alone() const { return alone_ != trying_; }

  // Takes in the seconds of a step that was run as `alone` said, and those of them in which workers waited in the kernel.
  void observe(double seconds, double held_up = 0);

 private:
  static constexpr int64_t kFirstInterval = 4, kIntervalAfterChange = 8, kMaxInterval = 1024;

  bool alone_ = false;            // what is best so far
  bool trying_ = false;           // the next step tries the other way
  double seconds_ = std::numeric_limits<double>::infinity();   // of a step the best way, smoothed
  double shortest_ = std::numeric_limits<double>::infinity();  // of such steps, what held them up not counted
  int num_steps_ = 0;  // such steps, until it is known what one takes
  int64_t interval_ = kFirstInterval;
  int64_t steps_left_ = kFirstInterval;  // before the other way is tried again
};

}  // namespace ridgeline
