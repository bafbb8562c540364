// csrc/cpu/dispatch.h: which build of the kernels runs.
#pragma once
#include <string>
#include <vector>

#include "api.h"

namespace fusedpg {

/// Names of the builds that this machine can run, best first; "generic" is always there.
std::vector<std::string> available_isas();

/// The build in use: FUSEDPG_CPU_ISA if set (read at every call), else the best. Throws std::invalid_argument for a bad value.
std::string chosen_isa();
const Kernels& chosen_kernels();

/// Asks for huge pages between two addresses, whose memory has not been touched yet; a hint.
void huge_pages(uintptr_t begin, uintptr_t end);

}  // namespace fusedpg
