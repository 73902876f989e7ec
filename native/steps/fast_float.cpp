#include "kernels.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template ChainSweeps<float> chain_sweeps<float, omega::Negentropy<float>>();
template ChainSweeps<float> chain_sweeps<float, omega::SquaredL2<float>>();
template ChainSweeps<float> chain_sweeps<float, omega::Hard<float>>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
