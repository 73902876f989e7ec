#include "kernels.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

#define OMEGA_SWEEPS(name, count, Policy) template ChainSweeps<float> chain_sweeps<float, omega::Policy<float>>();
BELLMAX_USUAL_OMEGAS(OMEGA_SWEEPS)

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
