// See tile_trap.cpp.
#pragma once

namespace ridgeline {

// From now on SIGILL runs tile instructions. True, so that it stands for "there are tiles".
bool install_tile_trap();

}  // namespace ridgeline
