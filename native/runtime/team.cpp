#include "runtime/team.h"

#include <algorithm>

namespace ridgeline {
namespace {

constexpr double kMinGain = 0.9;    // of the time: less is noise
constexpr double kDisturbed = 3.0;  // times the usual: something else has the core
constexpr double kSmoothing = 0.2;
constexpr int kCold = 4;  // first steps, of which the shortest counts: caches fill in the others, and threads wake
// Seconds of a step without the waiting. A worker without a core costs some milliseconds at a barrier: longer steps lose
// little by that, and would lose more by one that is tried on one worker.
constexpr double kLongest = 0.010;

}  // namespace

void Team::observe(double seconds, double held_up) {
  if (trying_) {
    trying_ = false;
    if (seconds < kMinGain * seconds_) {
      alone_ = !alone_;
      seconds_ = seconds;
      interval_ = kIntervalAfterChange;
    } else {
      interval_ = std::min(2 * interval_, kMaxInterval);
    }
    steps_left_ = interval_;
    return;
  }
  shortest_ = std::min(shortest_, seconds - held_up);
  const bool disturbed = seconds > kDisturbed * seconds_, is_cold = num_steps_ < kCold;
  num_steps_ += is_cold;
  if (is_cold)
    seconds_ = std::min(seconds_, seconds);
  else  // one that took much longer than usual says little of the next: its caller may have come late
    seconds_ += kSmoothing * (std::min(seconds, kDisturbed * seconds_) - seconds_);
  steps_left_--;
  trying_ = shortest_ <= kLongest && (steps_left_ <= 0 || (disturbed && !alone_));
}

}  // namespace ridgeline
