#include "kernels.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template ChainSweeps<double> chain_sweeps<double, omega::Negentropy<double>>();
template ChainSweeps<double> chain_sweeps<double, omega::SquaredL2<double>>();
template ChainSweeps<double> chain_sweeps<double, omega::Hard<double>>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
