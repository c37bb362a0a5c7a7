// Keeps this process alive where another one cuts off a file that is mapped here: what is lost reads as zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ridgeline {

class MapGuard {
 public:
  // Guards `bytes` of the file `fd` mapped at `begin`, up to the end of this object; what is beyond some tens of guards
  // at a time is not guarded.
  MapGuard(int fd, uintptr_t begin, size_t bytes);
  ~MapGuard();
  MapGuard(const MapGuard&) = delete;
  MapGuard& operator=(const MapGuard&) = delete;
  bool is_cut() const;  // whether the file is shorter now, or zeros were read at any time

 private:
  int fd_;
  size_t bytes_;
  struct Range* range_;
};

}  // namespace ridgeline
