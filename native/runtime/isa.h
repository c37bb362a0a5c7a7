// Which ISA levels this build has, which of them this machine can run, and the kernel table of each.
#pragma once

#include <string>
#include <vector>

#include "kernels/table.h"

namespace ridgeline {

// Level names, narrowest first, that this machine can run. "amx_emulated" comes last: it is for tests.
std::vector<std::string> runnable_levels();
// Levels with any kernel in their table. Only a level's own code fills it, so they are the runnable ones.
std::vector<std::string> filled_levels();
// The widest level that is not an emulation.
std::string best_level();
// The table of a runnable level. Throws std::invalid_argument that names the levels otherwise.
const KernelTable& kernels_of(const std::string& level);

}  // namespace ridgeline
