#include "kernels.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template ChainSweeps<float> chain_sweeps<float, omega::Root>();
#define OMEGA_SWEEPS(name, count, Policy)                                  \
    template ChainSweeps<float> chain_sweeps<float, omega::Policy<float>>(); \
    template ChainSweeps<double> chain_sweeps<double, omega::Policy<double>>();
BELLMAX_OTHER_OMEGAS(OMEGA_SWEEPS)

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
