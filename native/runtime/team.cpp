#include "runtime/team.h"

#include <algorithm>

namespace ridgeline {
namespace {

constexpr double kMinGain = 0.9;    // of the time: less is noise
constexpr double kDisturbed = 3.0;  // times the usual: something else has the core
constexpr double kSmoothing = 0.2;

}  // namespace

void Team::observe(double seconds) {
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
  const bool disturbed = seconds_ > 0 && seconds > kDisturbed * seconds_;
  seconds_ = seconds_ > 0 ? seconds_ + kSmoothing * (seconds - seconds_) : seconds;
  steps_left_--;
  trying_ = steps_left_ <= 0 || (disturbed && !alone_);
}

}  // namespace ridgeline
