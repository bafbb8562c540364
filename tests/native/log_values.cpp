// tests/native/log_values.cpp: reads floats from stdin and writes log_any of each to stdout, 16 lanes at a time, then one at a
// time, with denormals flushed as in every loop of the core.
#include <cstdio>
#include <vector>

#include "cpu/machine.h"
#include "cpu/storage.h"

int main() {
  using namespace fusedpg::FUSEDPG_ISA;
  std::vector<float> x(1 << 20), lanes(x.size()), single(x.size());
  const FlushDenormals flush;
  const size_t n = std::fread(x.data(), sizeof(float), x.size(), stdin);
  for (size_t i = 0; i < n; i += LANES) store(lanes.data() + i, log_any(load(x.data() + i)));
  for (size_t i = 0; i < n; ++i) single[i] = log_any(x[i]);
  std::fwrite(lanes.data(), sizeof(float), n, stdout);
  std::fwrite(single.data(), sizeof(float), n, stdout);
}
