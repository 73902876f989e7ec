#include "kernels.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template ChainSweeps<float> chain_sweeps<float, omega::Root>();
template ChainSweeps<float> chain_sweeps<float, omega::AnyTsallis>();
template ChainSweeps<double> chain_sweeps<double, omega::AnyTsallis>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
